"""Injected faults, and how a rank ends that fails or whose peers fail: at once, with the reason as its last line."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trainings import Starter, Training

from hpc.base.errors import UserError
from training.runtime.fault_injection import parse_fault

FLAGS = ("--epochs=2", "--batch-size=20", "--log-every=1", "--lr=0.05")


@pytest.mark.parametrize("text", ["step", "fire@3:0", "step@3", "step@3:0?"])
def test_any_other_fault_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="use POINT@STEP:RANK, with a point of step, save, "):
        parse_fault(text)


def last_line(training: Training) -> str:
    return training.output().splitlines()[-1]


@pytest.mark.parametrize(
    ("point", "line"),
    [
        ("raise", "RuntimeError: failure injected by --fault"),
        ("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. (injected by --fault"),
    ],
)
def test_a_crash_ends_a_rank_with_its_reason_as_the_last_line(start: Starter, point: str, line: str) -> None:
    training = start(*FLAGS, f"--fault={point}@3:0")
    assert training.wait() == [1]
    assert "Traceback (most recent call last):" in training.output()
    assert last_line(training).startswith(line)


def raise_in_many_lines() -> None:
    """In a rank: an error with the message first, as torch's C++ parts do."""
    from training.engine.step import Stepper

    def step(*_arguments: object) -> None:
        raise ValueError("it is broken\nException raised from here (most recent call first):\nframe #0: there")

    Stepper.step = step  # type: ignore[assignment, method-assign]


def test_an_error_of_many_lines_ends_with_its_message(start: Starter) -> None:
    training = start(*FLAGS, prepare=raise_in_many_lines)
    assert training.wait() == [1]
    assert last_line(training) == "ValueError: it is broken"


def raise_in_the_loader() -> None:
    """In a rank: images that nobody can read, for a reason that is no user's fault."""
    from training.data.dataset import ImageDataset

    def fail(_images: ImageDataset, _request: object) -> None:
        raise LookupError("no such thing")

    ImageDataset.__getitem__ = fail  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_loader_worker_ends_with_its_message(start: Starter, folder_data: Path, workers: int) -> None:
    start.data = folder_data
    training = start("--batch-size=3", "--image-size=24", f"--num-workers={workers}", prepare=raise_in_the_loader)
    assert training.wait() == [1]
    assert last_line(training) == "LookupError: no such thing"


def test_a_rank_that_leaves_without_a_word_ends_the_others(start: Starter) -> None:
    training = start(*FLAGS, "--fault=exit@3:1", world_size=2)
    assert training.wait() == [1, 0]
    assert last_line(training).startswith("RuntimeError: ")


def write_forever() -> None:
    """In a rank: a disk that does not answer."""
    import time

    from training.checkpoint import writer

    def hang(*_arguments: object, **_options: object) -> None:
        time.sleep(600)

    writer.save_checkpoint = hang  # type: ignore[assignment]


# Ranks wait for each other in many places; and rank 0 has a thread of its own that writes.
@pytest.mark.parametrize(
    ("dies", "flags", "prepare"),
    [
        (0, ("--fault=step@5:0",), None),
        (1, ("--fault=step@5:1",), None),
        (1, ("--fault=step@5:1", "--checkpoint-every=4"), write_forever),
        (1, ("--fault=evaluate@9:1",), None),
        (2, ("--fault=step@5:2", "--model=resnet20", "--sync-bn"), None),
    ],
)
def test_a_rank_whose_peer_was_killed_ends_by_itself(
    start: Starter, dies: int, flags: tuple[str, ...], prepare: Callable[[], None] | None
) -> None:
    training = start(*FLAGS, *flags, world_size=3, prepare=prepare)
    codes = training.wait()
    assert codes.pop(dies) == -signal.SIGKILL
    assert codes == [1, 1], training.output()
    assert last_line(training).startswith(("RuntimeError: ", "torch.distributed.DistBackendError: "))


def test_a_rank_with_loader_workers_ends_by_itself_too(start: Starter, folder_data: Path) -> None:
    start.data = folder_data
    flags = ("--batch-size=3", "--image-size=24", "--num-workers=2", "--epochs=2", "--fault=step@5:1")
    assert start(*flags, world_size=2).wait() == [1, -signal.SIGKILL]
