"""A request to stop at every moment of a training: it ends well, and the run ends as if uninterrupted."""

import importlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.step_signals import send_to_step
from support.trainings import Starter, agree_at_each_step, events, slow

from hpc.run.rundir import RunDir
from training.verify_resume.compare import compare_runs

FLAGS = ("--epochs=2", "--batch-size=40", "--log-every=1", "--lr=0.05", "--checkpoint-every=3", "--ema-decay=0.9")
FLAGS += ("--snapshot-every=2",)
# What a rank does, by the name of the function that does it: a signal has to arrive in the middle of the program, which
# offers no such place. `find` fails for a name that is gone.
MOMENTS = {
    "connecting to the other ranks": "training.engine.launch:connect",
    "the preflight": "training.engine.launch:run_preflight",
    "opening the data": "training.engine.launch:load_data",
    "the pass that warms up": "training.engine.step:Stepper.warm_up",
    "looking for a checkpoint": "torchrelay.saving.restoring:Restorer.restore",
    "loading a batch": "training.data.dataset:MemoryImages.__getitem__",
    "the first step": "training.engine.step:Stepper.step",
    "logging the loss": "training.engine.trainer:Trainer.log_if_due",
    "copying the state": "torchrelay.saving.tensor_files:Image.fill",
    "writing a checkpoint": "torchrelay.saving.state_writer:publish_checkpoint",
    "taking a snapshot": "torchrelay.saving.state_writer:StateWriter.save",
    "an evaluation": "training.evaluation.evaluator:Evaluator._evaluate_batch",
    "keeping the best model": "training.monitoring.run_logger:RunLogger.save_best",
    "the test": "training.evaluation.validation:numbers_of",
    "writing the result": "training.monitoring.run_logger:RunLogger.save_final",
    "the end of the writing": "training.monitoring.run_logger:RunLogger.close",
    "leaving the other ranks": "training.engine.launch:disconnect",
}
# Rank 0 alone does these.
OF_RANK_0 = {"copying the state", "writing a checkpoint"}
ONE, MANY = (signal.SIGTERM,), (signal.SIGUSR2, signal.SIGTERM) * 2


def find(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """A function, and where it is kept under which name."""
    module, _, path = place.partition(":")
    *holders, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for holder in holders:
        owner = getattr(owner, holder)
    return owner, name, getattr(owner, name)


def send_at(place: str, numbers: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """In a rank: have all its processes get these signals when a function is called for the first time."""
    if int(os.environ["RANK"]) not in ranks:
        return
    owner, name, original = find(place)
    left = list(numbers)

    def signalled(*arguments: Any, **named: Any) -> Any:
        while left:
            send_to_step(left.pop(0), os.getpid())
        return original(*arguments, **named)

    setattr(owner, name, signalled)


def send_early(place: str) -> None:
    """In a rank: receive a SIGUSR2 at a place; requests take effect as early as they can."""
    agree_at_each_step()
    send_at(place, (signal.SIGUSR2,), (0,))


@pytest.fixture(scope="module")
def uninterrupted(idx_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    start = Starter(idx_data, tmp_path_factory.mktemp("uninterrupted"))
    return RunDir(start.complete(*FLAGS, world_size=2).run_dir)


@pytest.mark.parametrize(
    ("moment", "numbers"),
    [
        *((moment, ONE) for moment in MOMENTS),
        *(slow(moment, MANY) for moment in ("the first step", "writing the result", "leaving the other ranks")),
    ],
)
def test_a_request_to_stop_costs_nothing(
    start: Starter, uninterrupted: RunDir, moment: str, numbers: tuple[int, ...]
) -> None:
    # One signal that one rank alone gets, or all of them to all.
    ranks = (0, 1) if len(numbers) > 1 else (0,) if moment in OF_RANK_0 else (1,)
    flags = (*FLAGS, f"--node-dir={start.directory / 'node'}")
    find(MOMENTS[moment])
    training = start(*flags, world_size=2, prepare=partial(send_at, MOMENTS[moment], numbers, ranks))
    assert training.wait() == [0, 0], training.output()
    run = RunDir(training.run_dir)
    stops = events(run.path, "train_stopped")
    assert bool(stops) != run.final_result.exists(), "it has either stopped or come to its end"
    for stop in stops:
        assert stop["signal"] in {"SIGTERM", "SIGUSR2"}
        assert stop["seconds"] >= 0
        assert (run.checkpoints / f"step-{stop['step']:08d}").exists()
        start.complete(*flags, world_size=2)
    different = {part.name: part.difference for part in compare_runs(uninterrupted, run) if part.difference}
    assert not different


@pytest.mark.parametrize(
    ("moment", "step"), [("connecting to the other ranks", 1), ("the first step", 2), ("leaving the other ranks", None)]
)
def test_a_stop_comes_about_a_step_after_the_boundary_that_it_is_heard_at(
    start: Starter, moment: str, step: int | None
) -> None:
    training = start(*FLAGS, prepare=partial(send_early, MOMENTS[moment]))
    assert training.wait() == [0], training.output()
    assert [event["step"] for event in events(training.run_dir, "train_stopped")] == ([step] if step else [])


def test_the_time_to_save_is_counted_from_the_signal(start: Starter) -> None:
    """Also where rank 0 has got none: then from the agreement on."""
    for rank in (0, 1):
        prepare = partial(send_at, MOMENTS["opening the data"], (signal.SIGTERM,), (rank,))
        assert start(*FLAGS, run=f"{rank}", world_size=2, prepare=prepare).wait() == [0, 0]
    [signalled], [other] = (events(start.directory / f"{rank}", "train_stopped") for rank in (0, 1))
    [started] = events(start.directory / "0", "train_started")
    assert signalled["seconds"] > signalled["time"] - started["time"], "the signal came before the training began"
    assert other["seconds"] < other["time"] - events(start.directory / "1", "train_started")[0]["time"]
