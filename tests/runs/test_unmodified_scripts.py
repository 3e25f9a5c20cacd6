"""An unmodified script, as in tutorials, prints the same under our launcher and under plain torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import Site, add_script, submit_and_wait

pytestmark = pytest.mark.timeout(400)

# Data-parallel training of a toy model that saves its state every epoch and resumes from it; then loader workers and a
# pool that are spawned, as CUDA needs them. The model is collected before Python ends: one rank in a hundred aborts if
# gloo's threads free its tensors at that time (torch 2.15; pytorch/pytorch#179291).
SCRIPT = """
import argparse
import gc
import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = "snapshot.pt"


class ToyDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def train(loader, model, epochs, save_every):
    rank, epochs_run = dist.get_rank(), 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT)
        model.load_state_dict(snapshot["model"])
        epochs_run = snapshot["epochs"]
        print(f"resuming at epoch {epochs_run}", flush=True)
    parallel, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(epochs_run, epochs):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(parallel(source), targets)
            loss.backward()
            optimizer.step()
        print(f"[rank {rank}] epoch {epoch}: {len(loader)} steps, loss {loss.item():.4f}", flush=True)
        if rank == 0 and epoch % save_every == 0:
            torch.save({"model": model.state_dict(), "epochs": epoch + 1}, SNAPSHOT)


def cube(number):
    return number**3


def use_workers():
    for context in (None, "forkserver"):
        loader = DataLoader(ToyDataset(8), batch_size=4, num_workers=1, multiprocessing_context=context)
        print(f"workers, {context}: {[targets.tolist() for _, targets in loader]}", flush=True)
    with multiprocessing.Pool(1) as pool:
        print(f"pool: {pool.map(cube, range(4))}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = ToyDataset(256)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=False, sampler=DistributedSampler(data))
    train(loader, torch.nn.Linear(20, 1), args.total_epochs, args.save_every)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        use_workers()
    gc.collect()
"""
ARGUMENTS = ("train.py", "3", "1", "--batch_size=64")


@pytest.fixture
def site(shared: Path) -> Site:
    return Site(shared, "/nonexistent")


def printed(log: Path) -> list[str]:
    """Return the lines that the script itself printed."""
    return [line for line in log.read_text().splitlines() if re.match(r"\[rank|resuming|workers|pool", line)]


@pytest.mark.slow
def test_script_runs_as_under_plain_torchrun(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # A file for each rank: in one pipe their lines would mix.
    outputs = ["--redirects=3", f"--log-dir={tmp_path / 'plain'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *outputs]
    plain = subprocess.run([*torchrun, *ARGUMENTS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert plain.returncode == 0, plain.stderr
    add_script(site, "train.py", SCRIPT)
    run = submit_and_wait(site, "--cluster=local", "--nodes=2", "--gpus-per-node=1", "--", *ARGUMENTS)
    logs = [run.directory.rank_log(1, rank) for rank in range(2)]
    assert run.status()["state"] == "completed", [log.read_text() for log in logs]
    expected = [printed(path) for path in sorted((tmp_path / "plain").rglob("stdout.log"))]
    assert [len(lines) for lines in expected] == [3 + 3, 3]
    assert list(map(printed, logs)) == expected
