"""A user's script with the helper on a real Slurm: a rank hangs, or no rank can save; what is restored."""

import os
import signal
from pathlib import Path

import pytest
from support.cluster import TWO_NODES, Run, Site, add_script, ranks_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# A tutorial's script: data, model, loop. An epoch is 50 steps, which are slow; it does not end by itself.
TRAIN = """
import time
from torchrelay import report, state
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

distributed.init_process_group("gloo")
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(1600, 8, generator=generator)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(2)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with state(model=model, optimizer=optimizer) as saved:
    for epoch in saved.epochs(1000):
        sampler.set_epoch(epoch)
        for x, y in saved.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            report(step=saved.step, epoch=epoch, loss=loss, images_per_second=16 * 2 / 0.05)
            time.sleep(0.05)
"""


def rank_pid(run: Run, rank: int) -> int:
    """The process of a rank: nodes share this machine's processes."""
    [pid] = [pid for pid, number in ranks_of(run).items() if number == rank]
    return pid


def wait_for_snapshot(run: Run, after: int) -> None:
    """Wait until all nodes hold a snapshot of a later step: the first node has the next one, too."""
    run.wait_for_steps(1)
    process = Path(f"/proc/{rank_pid(run, 0)}")
    words = (process / "environ").read_bytes().split(b"\0")
    [snapshots] = [word.decode().partition("=")[2] for word in words if word.startswith(b"TORCHRELAY_SNAPSHOTS=")]

    def later() -> list[Path]:
        return [path for path in Path(f"{process}/root{snapshots}").glob("step-*") if int(path.name[5:]) > after]

    run.wait(f"a snapshot after step {after}", lambda: len(later()) >= 2)


def test_snapshot_restores_a_hung_script_and_becomes_a_checkpoint_when_it_cannot_save(ordinary_user: Site) -> None:
    """Signals that are no stop, which Slurm sends to all processes of the step, interrupt nothing."""
    add_script(ordinary_user, "train.py", TRAIN)
    run = ordinary_user.submit(*TWO_NODES, "--hang-timeout=15s", "--grace-period=2s", "--", "train.py")
    run.wait_for_more_steps()
    for name in ("USR1", "HUP", "QUIT"):
        ordinary_user.slurm("scancel", f"--signal={name}", run.job_id)
    run.wait_for_more_steps()
    wait_for_snapshot(run, 1)
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.wait("the interruption", lambda: run.events("interruption"))
    [hang] = run.events("interruption")
    assert (hang["cause"], hang["rank"]) == ("hang", 1)
    run.wait("the restored ranks", lambda: len(run.events("train_started")) == 2)
    restored = run.events("train_started")[1]
    assert restored["source"] == "snapshot"

    wait_for_snapshot(run, restored["step"])
    for rank in (0, 1):
        os.kill(rank_pid(run, rank), signal.SIGSTOP)  # it cannot save any more
    ordinary_user.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_next_job()
    [saved] = run.events("snapshot_saved")
    assert saved["step"] > restored["step"]
    run.wait("the second attempt", lambda: len(run.events("train_started")) == 3)
    again = run.events("train_started")[2]
    assert (again["step"], again["source"]) == (saved["step"], "checkpoint")
    run.cancel()
