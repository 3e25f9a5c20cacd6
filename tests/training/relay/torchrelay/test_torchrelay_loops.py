"""The helper's loops over epochs and batches: a script that is stopped anywhere ends as if it had not been.

Also with loaders and gradients that have a state of their own; a state that cannot be exact is refused.
"""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.events import assert_typed
from support.relay_script import agent_variables
from support.trainings import lines, run_forked
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from torchrelay.loop_position import LoopPosition

pytestmark = pytest.mark.timeout(300)
# torchdata is not in the tests' environment (examples/README.md).
LIBRARIES = os.environ.get("TORCHRELAY_EXAMPLES")

# Everything that draws random numbers: the order, the transforms in the loader's workers or in the rank, dropout. The
# schedule's step and the evaluation follow the batches of an epoch. Each rank counts on its own.
SCRIPT = """
import json, os, random, signal, sys, time
from itertools import count
from torchrelay import report, state
from support.step_signals import send_to_step
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

results, kind, workers, stop_at, kill_at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
size = 48 // ranks


class Images(Dataset):
    def __len__(self): return size
    def __getitem__(self, index): return index, torch.full((4,), 0.1 * index) + torch.randn(4) + random.random()


class Stream(IterableDataset):
    def __iter__(self): return map(Images().__getitem__, range(size))
    def state_dict(self): return {}
    def load_state_dict(self, state): pass


class Shuffled(Sampler):
    def __init__(self): self.generators = [torch.Generator().manual_seed(1 + rank), random.Random(rank)]
    def __len__(self): return size
    def __iter__(self):
        order = torch.randperm(size, generator=self.generators[0]).tolist()
        self.generators[1].shuffle(order)
        return iter(order)


class Count:
    seen = 0
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]


distributed.init_process_group("gloo")
torch.manual_seed(7)
random.seed(8 + rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
torch.manual_seed(9 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
counter = Count()
Loader, data, options, per_step = DataLoader, Images(), {"batch_size": 6, "shuffle": True}, 1
if kind == "own generators":
    options = {"batch_size": 6, "sampler": Shuffled()}
elif kind.startswith("accumulate"):
    per_step = 3  # the gradients of an epoch's last batches belong to a step of the next epoch
elif kind.startswith("stateful"):
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    options["persistent_workers"] = kind == "stateful, persistent workers"
    if kind == "stateful stream":
        data, options = Stream(), {"batch_size": 6}
loader = Loader(data, num_workers=workers, multiprocessing_context="fork" if workers else None, **options)
saved_too = {"loader": loader} if kind.startswith("stateful") else {}
steps, used, ended = [], [], []
try:
    with state(
        model=model, optimizer=optimizer, schedule=schedule, counter=counter, snapshot_seconds=0.001, **saved_too
    ) as saved:
        steps.append(saved.step)
        batch_numbers = count(1)
        for epoch in saved.epochs(3 if kind != "accumulate for ever" else 99):
            numbers = batch_numbers if kind == "accumulate across epochs" else count(1)
            for indices, images in saved.batches(loader):
                number = next(numbers)
                loss = model(images).square().mean() / per_step
                loss.backward()
                if number % per_step == 0 and kind != "accumulate for ever":
                    optimizer.step()
                    optimizer.zero_grad()
                counter.seen += rank + 1
                used.append([epoch, saved.step, *indices.tolist()])
                report(step=saved.step, loss=loss)
                time.sleep(0.02)
                if saved.step == stop_at and rank == ranks - 1:
                    send_to_step(signal.SIGUSR2, os.getpid())
                if saved.step == kill_at and rank == ranks - 1:
                    time.sleep(0.3)  # the snapshot of a step shortly before is written
                    os.kill(os.getpid(), signal.SIGKILL)
            ended.append(epoch)
            schedule.step()
            if -1 - epoch == stop_at and rank == ranks - 1:
                send_to_step(signal.SIGUSR2, os.getpid())
    ended.append("all")
finally:
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    line = {"steps": [*steps, saved.step], "used": used, "ended": ended, "weights": weights, "seen": counter.seen}
    with open(f"{results}/{rank}.jsonl", "a") as file:
        file.write(json.dumps(line | {"lr": optimizer.param_groups[0]["lr"]}) + "\\n")
distributed.destroy_process_group()
"""


def run(
    directory: Path, kind: str = "plain", *, workers: int = 0, stop_at: int = -9, kill_at: int = -9, ranks: int = 1
) -> "subprocess.CompletedProcess[str]":
    """Run the script once more. Each rank writes a line at the end of each start."""
    for name in ("run", "snapshots"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    words = [str(directory), kind, str(workers), str(stop_at), str(kill_at)]
    environment = {**agent_variables(directory / "run"), "TORCHRELAY_SNAPSHOTS": str(directory / "snapshots")}
    if kind.startswith("stateful") and not (directory / "torchdata").exists():  # which is only Python
        [package] = Path(LIBRARIES or "").parents[1].glob("lib/python*/site-packages/torchdata")
        (directory / "torchdata").symlink_to(package)
    return run_forked(SCRIPT, *words, directory=directory, ranks=ranks, **environment)


def complete(directory: Path, kind: str = "plain", **options: int) -> list[dict[str, Any]]:
    """Run the script once more, without an error; return what rank 0 has written at the end of each start."""
    done = run(directory, kind, **options)
    assert done.returncode == 0, done.stderr
    return lines(directory / "0.jsonl")


# --- the order of the batches ---


def check_continues(directory: Path, stops: tuple[int, ...], *, workers: int = 0, ranks: int = 1) -> None:
    """Check that stops leave no trace in the batches, nor in what each rank has in the end."""
    complete(directory / "whole", workers=workers, ranks=ranks)
    for stop in stops:
        *_, stopped = complete(directory / "stopped", stop_at=stop, workers=workers, ranks=ranks)
        assert "all" not in stopped["ended"], "the script goes on after it was to stop"
    complete(directory / "stopped", workers=workers, ranks=ranks)
    for rank in range(ranks):
        [whole], starts = (lines(directory / name / f"{rank}.jsonl") for name in ("whole", "stopped"))
        assert len(starts) == len(stops) + 1
        assert [batch for start in starts for batch in start["used"]] == whole["used"]
        assert [epoch for start in starts for epoch in start["ended"]] == whole["ended"] == [0, 1, 2, "all"]
        assert {name: starts[-1][name] for name in ("weights", "lr", "seen")}.items() <= whole.items()


# Steps 8 and 24 are the last ones of epochs; -1 and -3 stand for the ends of epochs, after the schedule's step.
@pytest.mark.parametrize(("stops", "workers"), [((3, 8, -1, -3), 0), ((3, 24), 2)])
def test_stopped_loops_continue_with_the_same_batches(tmp_path: Path, stops: tuple[int, ...], workers: int) -> None:
    check_continues(tmp_path, stops, workers=workers)


def test_ranks_stop_together_and_each_continues_with_what_it_had(tmp_path: Path) -> None:
    """Two ranks stop a step after the signal, a single one stops at once."""
    check_continues(tmp_path, (1, 3, 7), ranks=2)
    directory = tmp_path / "stopped" / "run"
    assert [line["step"] for line in lines(directory / "metrics" / "train.jsonl")] == list(range(1, 13))
    assert_typed(directory / "events")
    events = lines(directory / "events" / "attempt-001-script.jsonl")
    start = ["train_started", "first_step", "checkpoint_saved"]
    assert [event["event"] for event in events] == 3 * [*start, "train_stopped"] + start
    assert (events[3]["step"], events[3]["signal"]) == (2, "SIGUSR2"), "one rank got the signal, at step 1"
    assert (events[4]["step"], events[4]["source"]) == (2, "checkpoint")


def test_half_of_an_epoch_is_half_of_it_for_twice_the_ranks(tmp_path: Path) -> None:
    complete(tmp_path, stop_at=4)
    *_, resumed = complete(tmp_path, ranks=2)
    assert [batch[:2] for batch in resumed["used"]][:3] == [[0, 5], [0, 6], [1, 7]]


def rest(position: LoopPosition, *batches: Any) -> list[Any]:
    return [*position.batches(batches, skipped=lambda: None)]


def test_epoch_may_have_several_loaders() -> None:
    first = LoopPosition({})
    second = first.batches(["c", "d", "e"], skipped=lambda: None)
    assert [*rest(first, "a", "b"), next(second)] == ["a", "b", "c"]
    later = LoopPosition({})
    later.load_state_dict(first.state_dict())
    assert [rest(later, "a", "b"), rest(later, "c", "d", "e"), rest(later, "f")] == [[], ["d", "e"], ["f"]]


def test_what_an_epoch_draws_before_its_batches_is_the_same() -> None:
    def drawn(position: LoopPosition) -> list[Any]:
        position.begin_epoch()
        return torch.randperm(8).tolist()

    first = LoopPosition({})
    order = drawn(first)
    batches = first.batches(order, skipped=lambda: None)
    used = [next(batches) for _ in range(3)]
    torch.rand(1)  # of the training
    later = LoopPosition({})
    later.load_state_dict(first.state_dict())
    now = torch.get_rng_state()
    assert [*used, *rest(later, *drawn(later))] == order
    assert torch.equal(torch.get_rng_state(), now), "the training's own random numbers"


def test_loop_that_was_left_is_over(tmp_path: Path) -> None:
    code = (
        "import torchrelay, sys\n"
        "with torchrelay.state() as saved:\n"
        "    for epoch in saved.epochs(9):\n"
        "        for batch in saved.batches(range(4)):\n"
        "            if saved.step == 6: break\n"
        "        if saved.step == 6: break\n"
        "    print(saved.step)\n"
    )
    for _ in range(2):
        assert run_forked(code, directory=tmp_path, **agent_variables(tmp_path)).stdout == "6\n"


# --- states of their own ---


def check_exact(directory: Path, kind: str, *, workers: int = 0, stops: tuple[int, ...] = (2, 4)) -> None:
    """Check that stops of two ranks, and then a kill, leave no trace in the weights."""
    [whole] = complete(directory / "whole", kind, workers=workers, ranks=2)
    for stop in stops:
        complete(directory / "cut", kind, workers=workers, stop_at=stop, ranks=2)
    assert run(directory / "cut", kind, workers=workers, kill_at=10, ranks=2).returncode != 0
    results = complete(directory / "cut", kind, workers=workers, ranks=2)
    # The two stops, and the start after the kill.
    starts = [first for first, _ in (result["steps"] for result in results)]
    assert 0 == starts[0] < starts[1] < starts[-1] < whole["steps"][1] == results[-1]["steps"][1] == 12
    assert results[-1]["weights"] == whole["weights"]


# An epoch of two ranks has 4 batches. They agree on a stop one batch after the signal: after batch 4, before epoch 1.
@pytest.mark.parametrize("workers", [0, 2])
def test_order_of_the_samplers_own_generators_continues(tmp_path: Path, workers: int) -> None:
    check_exact(tmp_path, "own generators", workers=workers)


@pytest.mark.parametrize("kind", ["accumulate", "accumulate across epochs"])
def test_accumulated_gradients_are_not_lost(tmp_path: Path, kind: str) -> None:
    check_exact(tmp_path, kind, stops=(1, 4))


def test_script_whose_optimizer_does_not_step_can_be_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, "accumulate for ever", stop_at=1)
    [result] = lines(tmp_path / "0.jsonl")
    assert (done.returncode, result["steps"]) == (0, [0, 257])
    assert "no optimizer has stepped for 256 batches" in done.stderr


@pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with torchdata")
@pytest.mark.parametrize(("kind", "workers"), [("stateful", 0), ("stateful", 2), ("stateful, persistent workers", 2)])
def test_random_transforms_of_a_stateful_loader_continue(tmp_path: Path, kind: str, workers: int) -> None:
    check_exact(tmp_path, kind, workers=workers)


@pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with torchdata")
def test_stateful_loader_whose_random_transforms_may_differ_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "stateful stream", workers=1)
    assert "leave loader out of state()" in done.stderr


class WithPosition:
    """A sampler, batch sampler, data set or stream that restores its own position."""

    def __iter__(self) -> Iterator[tuple[int]]:
        yield (0,)

    def __getitem__(self, _index: object) -> int:
        return 0

    def __len__(self) -> int:
        return 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        pass


class Stream(WithPosition, IterableDataset[tuple[int]]):
    pass


Loaders = Callable[[Any], Iterable[Any]]
LOADERS: dict[str, Loaders] = {
    "sampler": lambda own: DataLoader(WithPosition(), sampler=own),
    "batch sampler": lambda own: DataLoader(WithPosition(), batch_sampler=own),
    "in the batch sampler": lambda own: DataLoader(WithPosition(), batch_sampler=BatchSampler(own, 2, drop_last=False)),
    "data set": DataLoader,
    "in the data set": lambda own: DataLoader(Subset(own, [0])),
    "stream": lambda _: DataLoader(Stream()),
    "generator": lambda own: (batch for batch in DataLoader(own)),
    "limited": lambda own: islice(DataLoader(WithPosition(), sampler=own), 1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_part_of_the_loader_with_a_position_of_its_own_is_refused(kind: str) -> None:
    own = WithPosition()
    loader = LOADERS[kind](own)
    part: Any = loader.dataset if kind == "stream" else own  # type: ignore[attr-defined]  # a DataLoader
    with pytest.raises(ValueError, match=r"Leave part out of state\(\)"):
        next(LoopPosition({"part": part}).batches(loader, skipped=lambda: None))
    assert next(LoopPosition({"other": WithPosition()}).batches(loader, skipped=lambda: None)) is not None
