"""Worker processes die with their parent."""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.trainings import wait_for_the_end_of

from training.data.worker_process import die_with_parent

FORK = multiprocessing.get_context("fork")


def work(marks: Path, *, orphaned: bool) -> None:
    """In a worker."""
    parent = os.getppid()
    (marks / "begun").write_text(str(os.getpid()))
    while orphaned and os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent((signal.SIGTERM,))
    (marks / "left").touch()
    time.sleep(600)


def begin_worker(marks: Path, *, orphaned: bool) -> None:
    """In a parent."""
    worker: BaseProcess = FORK.Process(target=work, args=(marks,), kwargs={"orphaned": orphaned})
    worker.start()
    worker.join()


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_worker_ends_with_its_parent_also_if_that_was_before(tmp_path: Path, *, orphaned: bool) -> None:
    parent = FORK.Process(target=begin_worker, args=(tmp_path,), kwargs={"orphaned": orphaned})
    parent.start()
    mark = tmp_path / ("begun" if orphaned else "left")
    while not (mark.exists() and (tmp_path / "begun").read_text()):
        time.sleep(0.01)
    worker = int((tmp_path / "begun").read_text())
    os.kill(worker, signal.SIGTERM if not orphaned else 0)
    parent.kill()
    parent.join()
    wait_for_the_end_of(worker)
    assert (tmp_path / "left").exists() == (not orphaned)
