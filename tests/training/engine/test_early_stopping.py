"""Trainings that end before their last epoch: no improvement, no time left, a loss that is not finite."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.trainings import Starter, agree_at_each_step, events, lines, result, slow

from hpc.base.errors import EXIT_DIVERGED
from hpc.commands.start.submit import main as submit

# 193 images: 9 steps an epoch. A rate so small that the validation accuracy stays the same.
STILL = ("--lr=1e-30", "--weight-decay=0", "--batch-size=20", "--log-every=4", "--epochs=30")


# --- patience ---


@pytest.mark.parametrize("flags", [("--early-stopping-patience=3",), ("--lr-scheduler=plateau",)])
def test_a_submission_of_such_flags_without_validation_is_refused(
    idx_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    where = ["--cluster=local", "--dry-run", f"--runs-dir={tmp_path}"]
    without = f"{flags[0].replace('=', ' ')} needs validation data, and there are none: "
    refused = {"--val-split=0": f"{without}use --val-split 0.1, or add val/"}
    refused["--synthetic"] = f"{without}leave out --synthetic"
    for flag, message in refused.items():
        assert submit([*where, f"--data={idx_data}", flag, *flags]) == 2
        assert capsys.readouterr().err == f"hpc submit: {message}\n"
    assert submit([*where, f"--data={idx_data}", *flags]) == 0


def test_flags_without_effect_are_warned_of_at_submission_and_at_the_start(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--data={start.data}", "--lr-step-epochs=5", "--epochs=1"]
    assert submit(["--cluster=local", "--dry-run", "--json", f"--runs-dir={tmp_path}", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.err == "hpc submit: warning: --lr-step-epochs 5 has no effect: it applies to --lr-scheduler step\n"
    assert json.loads(printed.out)["cluster"] == "local"
    assert "warning: --lr-step-epochs 5 has no effect" in start.complete(*flags).output()


@pytest.mark.parametrize("fault", ["evaluate@27:0", slow("stop@20:0"), slow("evaluate@36:1")])
def test_a_training_that_does_not_improve_ends_and_is_complete_also_after_a_restart(start: Starter, fault: str) -> None:
    flags = (*STILL, "--early-stopping-patience=3", "--checkpoint-every=5")
    codes = start(*flags, f"--fault={fault}", world_size=2).wait()
    assert codes == ([0, 0] if "stop" in fault else codes)
    training = start.complete(*flags, world_size=2)
    # The first validation is the best one; three more are not better.
    evaluations = lines(training.run_dir / "metrics" / "eval.jsonl")
    assert [line["epoch"] for line in evaluations if line["split"] == "val"] == [1, 2, 3, 4]
    outcome = result(training.run_dir)
    assert (outcome["ended"], outcome["step"], outcome["epoch"]) == ("early_stopping", 36, 4)
    assert outcome["test_accuracy"] is not None
    assert (
        "the training ends early, after step 36: no higher validation accuracy for 3 epochs (--early-stopping-patience)"
        in training.output()
    )
    assert events(training.run_dir, "train_completed")[0]["ended"] == "early_stopping"


# --- hours ---


def spend(seconds: float) -> None:
    """In a rank: let the clock advance by this much with each step."""
    from training.engine import early_stopping
    from training.engine.step import Stepper

    step, spent = Stepper.step, [0.0]

    def timed_step(stepper: Stepper, *arguments: Any) -> None:
        step(stepper, *arguments)
        spent[0] += seconds

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return spent[0]

    Stepper.step = timed_step  # type: ignore[method-assign]
    agree_at_each_step()
    early_stopping.time = Clock  # type: ignore[assignment]


def test_max_hours_counts_all_attempts(start: Starter) -> None:
    # A step takes a minute: 20 of them are a third of an hour, and the wish to end is heard a step later.
    flags = ("--epochs=30", "--batch-size=20", "--max-hours=0.3333", "--checkpoint-every=4")
    training = start(*flags, "--fault=stop@8:0", world_size=2, prepare=partial(spend, 60))
    assert training.wait() == [0, 0], training.output()
    [stopped] = events(training.run_dir, "train_stopped")
    killed = start(*flags, "--fault=step@14:1", world_size=2, prepare=partial(spend, 60))
    assert -signal.SIGKILL in killed.wait()
    [saved] = [event["step"] for event in events(training.run_dir, "checkpoint_saved")][-1:]
    ended = start(*flags, world_size=2, prepare=partial(spend, 60))
    assert ended.wait() == [0, 0], ended.output()
    assert 0 < stopped["step"] <= saved < 14  # the kill may have come before the checkpoint of step 12
    outcome = result(training.run_dir)
    assert (outcome["ended"], outcome["step"]) == ("max_hours", 21)
    assert "the training ends early, after step 21: the limit of --max-hours 0.3333 is reached" in ended.output()


def die_late(run_dir: Path, seconds: float) -> None:
    """In a rank: die before `final/` is written, once the last checkpoint is."""
    from training.monitoring.run_logger import RunLogger

    def die(*_: Any) -> None:
        while not list((run_dir / "checkpoints").glob("step-*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    spend(seconds)
    RunLogger.save_final = die  # type: ignore[method-assign]


def test_no_step_follows_when_max_hours_are_over(start: Starter) -> None:
    flags = ("--epochs=30", "--batch-size=20", "--max-hours=0.05")
    killed = start(*flags, prepare=partial(die_late, start.directory / "run", 60))
    assert killed.wait() == [-signal.SIGKILL], killed.output()
    run = start.complete(*flags).run_dir
    started = events(run, "train_started")[1]["step"]
    assert result(run)["step"] == started == 4
    assert events(run, "first_step") == events(run, "first_step")[:1], "the second attempt made no step"


# --- the time limit ---


def test_a_stop_in_the_last_step_of_an_epoch_starts_no_other_epoch_and_no_other_save(start: Starter) -> None:
    """The signal comes --signal-before before the limit, which must suffice for one step and one save."""
    flags = ("--epochs=3", "--batch-size=20", "--fault=stop@9:0")
    training = start(*flags, world_size=2, prepare=agree_at_each_step)
    assert training.wait() == [0, 0], training.output()
    assert events(training.run_dir, "train_stopped")[0]["step"] == 9
    assert len(events(training.run_dir, "checkpoint_saved")) == 1, "the epoch's checkpoint is that of the stop"
    assert start.complete("--epochs=3", "--batch-size=20", world_size=2)


# --- a loss that is no number ---


@pytest.mark.parametrize(
    "flags", [("--log-every=9",), slow(("--log-every=50", "--checkpoint-every=8")), slow(("--grad-accum-steps=2",))]
)
def test_the_first_step_with_a_nan_loss_and_its_images_are_recorded(start: Starter, flags: tuple[str, ...]) -> None:
    """In a resumed attempt, too. What was saved before is there, to go on from with other flags."""
    flags = ("--epochs=3", "--batch-size=20", "--log-samples", *flags)
    assert start(*flags, "--fault=stop@10:0", world_size=2, prepare=agree_at_each_step).wait() == [0, 0]
    training = start(*flags, "--fault=loss@14:1", world_size=2)
    assert training.wait() == [EXIT_DIVERGED] * 2, training.output()
    assert "error: the loss is nan since step 14: the training has diverged, use a smaller --lr" in training.output()
    assert training.output().count("error: ") == 1
    outcome = json.loads((training.run_dir / "diverged.json").read_text())
    assert outcome["step"] == 14
    logs = sorted((training.run_dir / "metrics" / "samples").glob("*.jsonl"))
    used = [index for log in logs for line in lines(log) if line["step"] == 14 for index in line["indices"]]
    assert outcome["indices"] == used
    assert outcome["images"][0] == f"image {used[0]} of the training set"
    assert events(training.run_dir, "diverged")[0]["step"] == 14
    start.complete(*flags, "--lr=0.01", world_size=2)
