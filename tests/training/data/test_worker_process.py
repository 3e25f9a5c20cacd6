"""Worker processes die with their parent (of loaders that still have one: test_torchrelay_heartbeat, test_dataset)."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from support.trainings import wait_for_the_end_of

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
