"""Injected faults, and how a rank ends that fails or whose peers fail: at once, with the reason as its last line."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trainings import Starter, Training

FLAGS = ("--epochs=2", "--batch-size=20", "--log-every=1", "--lr=0.05")


def last_line(training: Training) -> str:
    return training.output().splitlines()[-1]


def raise_in_many_lines() -> None:
    """In a rank: an error with the message first, as torch's C++ parts do."""
    from training.engine.step import Stepper

    def step(*_arguments: object) -> None:
        raise ValueError("it is broken\nException raised from here (most recent call first):\nframe #0: there")

    Stepper.step = step  # type: ignore[assignment, method-assign]


def raise_in_the_loader() -> None:
    """In a rank: images that nobody can read, for a reason that is no user's fault."""
    from training.data.dataset import ImageDataset

    def fail(_images: ImageDataset, _request: object) -> None:
        raise LookupError("no such thing")

    ImageDataset.__getitem__ = fail  # type: ignore[assignment, method-assign]


# Flags, whatever else is done to the rank, and how its last line begins.
CRASHES: list[tuple[tuple[str, ...], Callable[[], None] | None, str]] = [
    (("--fault=raise@3:0",), None, "RuntimeError: failure injected by --fault"),
    (("--fault=oom@3:0",), None, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. (injected "),
    ((), raise_in_many_lines, "ValueError: it is broken"),
    (("--image-size=24", "--num-workers=0"), raise_in_the_loader, "LookupError: no such thing"),
    (("--image-size=24", "--num-workers=2"), raise_in_the_loader, "LookupError: no such thing"),
]


@pytest.mark.parametrize(("flags", "prepare", "line"), CRASHES)
def test_a_crash_ends_a_rank_with_its_reason_as_the_last_line(
    start: Starter, folder_data: Path, flags: tuple[str, ...], prepare: Callable[[], None] | None, line: str
) -> None:
    if prepare is raise_in_the_loader:
        start.data = folder_data
    training = start(*FLAGS, *flags, prepare=prepare)
    assert training.wait() == [1]
    assert "Traceback (most recent call last):" in training.output()
    assert last_line(training).startswith(line)
    if not line.endswith("(injected "):
        assert last_line(training) == line


def test_a_rank_that_leaves_without_a_word_ends_the_others(start: Starter) -> None:
    training = start(*FLAGS, "--fault=exit@3:1", world_size=2)
    assert training.wait() == [1, 0]
    assert last_line(training).startswith("RuntimeError: ")


def write_forever() -> None:
    """In a rank: a disk that does not answer."""
    from torchrelay.saving import state_writer

    def hang(*_arguments: object, **_options: object) -> None:
        time.sleep(600)

    state_writer.publish_checkpoint = hang  # type: ignore[assignment]


# Ranks wait for each other in many places; and rank 0 has a thread of its own that writes.
@pytest.mark.parametrize(
    ("dies", "data", "flags", "prepare"),
    [
        (0, "idx_data", ("--fault=step@5:0",), None),
        (1, "idx_data", ("--fault=step@5:1", "--checkpoint-every=4"), write_forever),
        (1, "idx_data", ("--fault=evaluate@9:1",), None),
        (1, "folder_data", ("--fault=step@2:1", "--num-workers=2", "--image-size=24", "--batch-size=6"), None),
    ],
)
def test_a_rank_whose_peer_was_killed_ends_by_itself(
    start: Starter,
    request: pytest.FixtureRequest,
    dies: int,
    data: str,
    flags: tuple[str, ...],
    prepare: Callable[[], None] | None,
) -> None:
    start.data = request.getfixturevalue(data)
    training = start(*FLAGS, *flags, world_size=3, prepare=prepare)
    codes = training.wait()
    assert codes.pop(dies) == -signal.SIGKILL
    assert codes == [1, 1], training.output()
    assert last_line(training).startswith(("RuntimeError: ", "torch.distributed.DistBackendError: "))
