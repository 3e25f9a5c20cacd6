"""The helper's loops with loaders and gradients that have a state of their own: exact after a stop, or refused."""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.relay_script import agent_variables
from support.trainings import run_forked
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from torchrelay.loop_position import LoopPosition

pytestmark = pytest.mark.timeout(300)
# torchdata is not in the tests' environment (examples/README.md).
LIBRARIES = os.environ.get("TORCHRELAY_EXAMPLES")

SCRIPT = """
import json, os, random, signal, sys, time
from itertools import count
from torchrelay import report, state
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

results, kind, workers, stop_at, kill_at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Images(Dataset):
    def __len__(self): return 48
    def __getitem__(self, index): return index, torch.full((4,), 0.1 * index) + torch.randn(4) + random.random()


class Stream(IterableDataset):
    def __iter__(self): return map(Images().__getitem__, range(48))
    def state_dict(self): return {}
    def load_state_dict(self, state): pass


class Shuffled(Sampler):
    def __init__(self): self.generators = [torch.Generator().manual_seed(1 + rank), random.Random(rank)]
    def __len__(self): return 48
    def __iter__(self):
        order = torch.randperm(48, generator=self.generators[0]).tolist()
        self.generators[1].shuffle(order)
        return iter(order)


distributed.init_process_group("gloo")
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
torch.manual_seed(9 + rank)
random.seed(9 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
Loader, data, options, per_step = DataLoader, Images(), {"batch_size": 6, "shuffle": True}, 1
if kind == "own generators":
    options = {"batch_size": 6, "sampler": Shuffled()}
elif kind.startswith("accumulate"):
    per_step = 3  # an epoch has 8 batches: the gradients of the last two belong to a step of the next epoch
elif kind.startswith("stateful"):
    from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    options["persistent_workers"] = kind == "stateful, persistent workers"
    if kind == "stateful stream":
        data, options = Stream(), {"batch_size": 6}
loader = Loader(data, num_workers=workers, multiprocessing_context="fork" if workers else None, **options)
saved_too = {"loader": loader} if kind.startswith("stateful") else {}
steps = []
try:
    with state(model=model, optimizer=optimizer, snapshot_seconds=0.001, **saved_too) as saved:
        steps.append(saved.step)
        batch_numbers = count(1)
        for epoch in saved.epochs(3 if kind != "accumulate for ever" else 99):
            numbers = batch_numbers if kind == "accumulate across epochs" else count(1)
            for indices, images in saved.batches(loader):
                number = next(numbers)
                (model(images).square().mean() / per_step).backward()
                if number % per_step == 0 and kind != "accumulate for ever":
                    optimizer.step()
                    optimizer.zero_grad()
                report(step=saved.step)
                time.sleep(0.02)
                if saved.step == stop_at and rank == ranks - 1:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if saved.step == kill_at and rank == ranks - 1:
                    time.sleep(0.3)  # the snapshot of a step shortly before is written
                    os.kill(os.getpid(), signal.SIGKILL)
finally:
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    with open(f"{results}/{rank}.jsonl", "a") as file:
        file.write(json.dumps({"steps": [*steps, saved.step], "weights": weights}) + "\\n")
distributed.destroy_process_group()
"""


def run(
    directory: Path, kind: str, *, workers: int = 0, stop_at: int = -9, kill_at: int = -9, ranks: int = 2
) -> tuple["subprocess.CompletedProcess[str]", list[dict[str, Any]]]:
    """Run the script once more; return how it ended, and what rank 0 has written at the end of each start."""
    for name in ("run", "snapshots"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    words = [str(directory), kind, str(workers), str(stop_at), str(kill_at)]
    environment = {**agent_variables(directory / "run"), "TORCHRELAY_SNAPSHOTS": str(directory / "snapshots")}
    if kind.startswith("stateful") and not (directory / "torchdata").exists():  # which is only Python
        [package] = Path(LIBRARIES or "").parents[1].glob("lib/python*/site-packages/torchdata")
        (directory / "torchdata").symlink_to(package)
    done = run_forked(SCRIPT, *words, directory=directory, ranks=ranks, **environment)
    results = directory / "0.jsonl"
    return done, [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def check_exact(directory: Path, kind: str, *, workers: int = 0, stops: tuple[int, ...] = (3, 8)) -> None:
    """Check that stops, and then a kill, leave no trace in the weights."""
    done, [whole] = run(directory / "whole", kind, workers=workers)
    assert done.returncode == 0, done.stderr
    for stop in stops:
        done, _ = run(directory / "cut", kind, workers=workers, stop_at=stop)
        assert done.returncode == 0, done.stderr
    done, _ = run(directory / "cut", kind, workers=workers, kill_at=20)
    assert done.returncode != 0
    done, results = run(directory / "cut", kind, workers=workers)
    assert done.returncode == 0, done.stderr
    # The two stops, and the start after the kill.
    starts = [first for first, _ in (result["steps"] for result in results)]
    assert 0 == starts[0] < starts[1] < starts[-1] < whole["steps"][1] == results[-1]["steps"][1] == 24
    assert results[-1]["weights"] == whole["weights"]


# An epoch has 8 batches. The ranks agree on a stop one batch after the signal, and after batch 8 before the next epoch.
@pytest.mark.parametrize("workers", [0, 2])
def test_order_of_the_samplers_own_generators_continues(tmp_path: Path, workers: int) -> None:
    check_exact(tmp_path, "own generators", workers=workers)


@pytest.mark.parametrize("kind", ["accumulate", "accumulate across epochs"])
def test_accumulated_gradients_are_not_lost(tmp_path: Path, kind: str) -> None:
    check_exact(tmp_path, kind, stops=(1, 8))


def test_script_whose_optimizer_does_not_step_can_be_stopped(tmp_path: Path) -> None:
    done, [result] = run(tmp_path, "accumulate for ever", stop_at=1, ranks=1)
    assert (done.returncode, result["steps"]) == (0, [0, 257])
    assert "no optimizer has stepped for 256 batches" in done.stderr


@pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with torchdata")
@pytest.mark.parametrize(("kind", "workers"), [("stateful", 0), ("stateful", 2), ("stateful, persistent workers", 2)])
def test_random_transforms_of_a_stateful_loader_continue(tmp_path: Path, kind: str, workers: int) -> None:
    check_exact(tmp_path, kind, workers=workers)


@pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with torchdata")
def test_stateful_loader_whose_random_transforms_may_differ_is_named(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "stateful stream", workers=1, ranks=1)
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
