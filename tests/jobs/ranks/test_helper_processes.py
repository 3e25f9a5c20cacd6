"""Slurm's signals reach every process of a rank: its workers and services live on, and end when the script ends them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT

from hpc.run.nodedir import NodeDir
from jobs.ranks.torchrun import PROCESS_WRAPPER

# As torchrun does it with --run-path: a rank's wrapper is a fork of it, which forks the rank.
TORCHRUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def start_rank(directory: Path, script: str, *words: str, own: bool = False) -> "subprocess.Popen[bytes]":
    """Start a script as a rank: in a fork of its wrapper, or in a Python of its own."""
    for part in NodeDir(directory).directories:
        part.mkdir(parents=True, exist_ok=True)
    (directory / "script.py").write_text(script)
    wrapper = [str(PROCESS_WRAPPER), "rank", str(directory), str(directory)]
    if own:
        wrapper += [sys.executable, "-P", str(PROCESS_WRAPPER), "own"]
    torchrun = [sys.executable, "-P", "-c", TORCHRUN, *wrapper, "script", str(directory / "script.py"), *words]
    path = f"{ROOT}:{ROOT / 'tests'}"
    return subprocess.Popen(
        [sys.executable, "-S", str(PROCESS_WRAPPER), "torchrun", *torchrun], cwd=directory,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": path},
    )  # fmt: skip


def run_rank(directory: Path, script: str, *words: str, own: bool = False) -> list[str]:
    """Run a script as a rank, which must succeed. Returns what it prints."""
    exit_code = start_rank(directory, script, *words, own=own).wait()
    log = (directory / "rank-00.log").read_text()
    assert exit_code == 0, log
    return log.splitlines()


# Before the rank handles the signals, it ignores them. Workers that are not forked import torch, so there are fewer.
LOADERS = """
import itertools, multiprocessing, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from support.step_signals import send_to_step

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

class Map(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return index

class Iterable(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        yield from range(worker.id, 64, worker.num_workers)

def read(kind, method, **more):
    loader = DataLoader(kind(), batch_size=4, num_workers=2, multiprocessing_context=method, **more)
    for number in SIGNALS[:1 + len(more)]:
        indices = []
        for place, batch in enumerate(loader):
            indices += batch.tolist()
            if place == 1:
                send_to_step(number)
            if place == 9:
                [send_to_step(number) for number in SIGNALS]
        assert sorted(indices) == list(range(64)), indices
    print("read", kind.__name__)

if __name__ == "__main__":
    method = sys.argv[1]
    multiprocessing.set_forkserver_preload(["torch"])
    if method != "spawn":
        read(Map, method)
        read(Iterable, method)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: print("handled", number))
    read(Map, method, persistent_workers=True)
    if method == "fork":
        read(Iterable, method)
"""


@pytest.mark.parametrize(("method", "own"), [("fork", False), ("fork", True), ("spawn", False), ("forkserver", False)])
def test_loader_workers_read_all_data(tmp_path: Path, method: str, own: bool) -> None:
    printed = run_rank(tmp_path, LOADERS, method, own=own)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        assert f"handled {number.value}" in printed, "the rank itself hears the signals"
