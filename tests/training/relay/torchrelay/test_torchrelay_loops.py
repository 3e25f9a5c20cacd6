"""The helper's loops over epochs and batches: a script that is stopped anywhere ends as if it had not been."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.relay_script import agent_variables
from support.trainings import run_forked
from torchrelay.loop_position import LoopPosition

pytestmark = pytest.mark.timeout(300)

# Everything that draws random numbers: the order, the transforms in the loader's workers or in the rank, dropout. The
# schedule's step and the evaluation follow the batches of an epoch.
SCRIPT = """
import json, os, random, signal, sys, time
from torchrelay import report, state
from support.step_signals import send_to_step
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

results, stop_at, workers, ranks = sys.argv[1], [int(each) for each in sys.argv[2].split(",")], *map(int, sys.argv[3:5])


class Images(Dataset):
    def __len__(self): return 48 // ranks
    def __getitem__(self, index): return index, torch.full((4,), 0.1 * index) + torch.randn(4) + random.random()


rank = int(os.environ.get("RANK", 0))
distributed.init_process_group("gloo")
torch.manual_seed(7)
random.seed(8 + rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
torch.manual_seed(9 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
context = "fork" if workers else None
loader = DataLoader(Images(), batch_size=6, shuffle=True, num_workers=workers, multiprocessing_context=context)
used, ended = [], []
try:
    with state(model=model, optimizer=optimizer, schedule=schedule, snapshot_seconds=0) as saved:
        for epoch in saved.epochs(3):
            for indices, images in saved.batches(loader):
                loss = model(images).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                used.append([epoch, saved.step, *indices.tolist()])
                report(step=saved.step, loss=loss)
                time.sleep(0.05)  # longer than the pause between two exchanges of the ranks
                if saved.step in stop_at and rank == 0:
                    send_to_step(signal.SIGUSR2, os.getpid())
            ended.append(epoch)
            schedule.step()
            if -1 - epoch in stop_at and rank == 0:
                send_to_step(signal.SIGUSR2, os.getpid())
    ended.append("all")
finally:
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    line = {"used": used, "ended": ended, "weights": weights, "lr": optimizer.param_groups[0]["lr"]}
    with open(f"{results}/{rank}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
distributed.destroy_process_group()
"""


def run(directory: Path, *, stop_at: str = "0", workers: int = 0, ranks: int = 1) -> list[dict[str, Any]]:
    """Run the script once more; return what rank 0 has written at the end of each start."""
    directory.mkdir(exist_ok=True)
    done = run_forked(SCRIPT, str(directory), stop_at, str(workers), str(ranks), directory=directory, ranks=ranks,
                     **agent_variables(directory))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "0.jsonl").read_text().splitlines()]


# Steps 8 and 24 are the last ones of epochs; -1 and -3 stand for the ends of epochs, after the schedule's step.
# Two ranks stop a step after the signal, a single one stops at once.
@pytest.mark.parametrize(
    ("stops", "workers", "ranks"),
    [(("3", "8", "-1", "-3"), 0, 1), (("3", "24"), 2, 1), (("1", "3", "7"), 0, 2)],
)
def test_stopped_loops_continue_with_the_same_batches(
    tmp_path: Path, stops: tuple[str, ...], workers: int, ranks: int
) -> None:
    [whole] = run(tmp_path / "whole", workers=workers, ranks=ranks)
    for stop in stops:
        *_, stopped = run(tmp_path / "stopped", stop_at=stop, workers=workers, ranks=ranks)
        assert "all" not in stopped["ended"], "the script goes on after it was to stop"
    starts = run(tmp_path / "stopped", workers=workers, ranks=ranks)
    assert len(starts) == len(stops) + 1
    assert [batch for start in starts for batch in start["used"]] == whole["used"]
    assert [epoch for start in starts for epoch in start["ended"]] == whole["ended"] == [0, 1, 2, "all"]
    assert (starts[-1]["weights"], starts[-1]["lr"]) == (whole["weights"], whole["lr"])


def test_half_of_an_epoch_is_half_of_it_for_twice_the_ranks(tmp_path: Path) -> None:
    run(tmp_path, stop_at="4")
    *_, resumed = run(tmp_path, ranks=2)
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
