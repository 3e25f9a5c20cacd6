"""Worker processes die with their parent, and are small. Loaders: test_relay_heartbeat.py, test_dataset.py."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from support.trainings import run_forked, wait_for_the_end_of

from training.data.worker_process import die_with_parent

FORK = multiprocessing.get_context("fork")


def work(marks: Path) -> None:
    """In a worker."""
    parent = os.getppid()
    (marks / "begun").write_text(str(os.getpid()))
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent((signal.SIGTERM,))
    (marks / "left").touch()


def begin_worker(marks: Path) -> None:
    """In a parent."""
    worker = FORK.Process(target=work, args=(marks,))
    worker.start()
    worker.join()


def test_a_worker_whose_parent_has_died_before_ends_too(tmp_path: Path) -> None:
    parent = FORK.Process(target=begin_worker, args=(tmp_path,))
    parent.start()
    begun = tmp_path / "begun"
    while not (begun.exists() and begun.read_text()):
        time.sleep(0.01)
    parent.kill()
    parent.join()
    wait_for_the_end_of(int(begun.read_text()))
    assert not (tmp_path / "left").exists()


# In a process of its own: the C library is set for good.
MEMORY = """
from pathlib import Path
import torch
from training.data.batch_schedule import BatchRequest
from training.data.loader import Batch, load_batches
from training.engine.freed_memory import keep_freed_memory

def megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

class Images:
    def __getitem__(self, request):
        nothing = torch.zeros(0)
        return Batch(nothing, torch.tensor([megabytes()]), nothing, nothing)

keep_freed_memory()
tensors = [torch.ones(8 * 2**18) for _ in range(16)]
del tensors
kept = megabytes()
with load_batches(Images(), [BatchRequest(indices=(), epoch=None)], 1, pin_memory=False) as batches:
    print(kept - int(next(batches).labels))
"""


def test_a_worker_keeps_no_memory_that_the_rank_has_freed(tmp_path: Path) -> None:
    done = run_forked(MEMORY, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100, "16 tensors of 8 MiB were freed"
