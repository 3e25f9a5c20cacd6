"""A script's snapshots are written over outdated ones, from memory that is used again."""

import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.relay_script import agent_variables
from support.trainings import run_forked
from torch import nn
from torchrelay.checkpoint_files import list_checkpoints, read_checkpoint, step_of
from torchrelay.object_states import STATE_FILE, CopyMemory, capture_states
from torchrelay.saved_state import Snapshots


def content(step: int, size: int = 1000) -> dict[str, Any]:
    return {"step": step, "shared": {"values": torch.full((size,), float(step))}, "own": []}


def read(path: Path) -> dict[str, Any]:
    assert not isinstance(read_checkpoint(path), str)
    saved: dict[str, Any] = torch.load(path / STATE_FILE, weights_only=True)
    return saved


def test_three_files_are_written_in_turn_and_the_newest_two_stay(tmp_path: Path) -> None:
    snapshots, inodes = Snapshots(tmp_path), list[int]()
    for step, size in enumerate((1000, 2000, 3000, 50, 70_000, 1000, 3)):
        snapshots.save(step, content(step, size), 100)
        newest, *older = list_checkpoints(tmp_path)
        inodes.append((newest / STATE_FILE).stat().st_ino)
        assert torch.equal(read(newest)["shared"]["values"], content(step, size)["shared"]["values"])
        assert [step_of(path) for path in older] == [step - 1][:step]
        assert [read(path)["step"] for path in older] == [step - 1][:step]
    assert len(set(inodes)) == 3
    assert inodes[3:] == inodes[:-3]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("pattern", ["*", ".step-*", "step-*", "**/state.pt"])
def test_snapshots_go_on_after_somebody_has_removed_them(tmp_path: Path, pattern: str) -> None:
    directory = tmp_path / "snapshots"
    snapshots = Snapshots(directory)
    for step in range(4):
        snapshots.save(step, content(step), 100)
    for path in list(directory.glob(pattern)):
        path.rename(tmp_path / f"removed-{path.parent.name}-{path.name}")
    for step in range(4, 8):
        snapshots.save(step, content(step), 100)
    assert [read(path)["step"] for path in list_checkpoints(directory)] == [7, 6]
    assert len(list(directory.iterdir())) == 3


@pytest.fixture
def file_limit() -> Iterator[int]:
    """The most bytes of a file of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_is_an_error_of_the_system_and_leaves_the_others(
    tmp_path: Path, file_limit: int
) -> None:
    snapshots = Snapshots(tmp_path)
    for step in range(4):
        snapshots.save(step, content(step), 100)
    with pytest.raises(OSError, match="File too large") as error:
        snapshots.save(4, content(4, file_limit), 100)
    assert error.value.errno == errno.EFBIG
    assert [read(path)["step"] for path in list_checkpoints(tmp_path)] == [3, 2]
    assert len(list(tmp_path.iterdir())) == 2, "half a snapshot is left"


def test_without_space_for_three_none_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"has no space for 3 snapshots of 1,000,000,000,000\.0 MB"):
        Snapshots(tmp_path).save(1, content(1), 10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_made_in_the_memory_of_the_one_before_unless_that_does_not_fit() -> None:
    model, memory = nn.Linear(3, 2), CopyMemory()
    first = capture_states({"model": model}, 1, memory)["shared"]["model"]
    with torch.no_grad():
        model.weight.fill_(7)
    assert not bool((first["weight"] == 7).any()), "the copy changes with the model"
    second = capture_states({"model": model}, 2, memory)["shared"]["model"]
    assert second["weight"] is first["weight"]
    assert torch.equal(second["weight"], model.weight)
    model.weight = nn.Parameter(torch.rand(4, 3))
    third = capture_states({"model": model}, 3, memory)["shared"]["model"]
    assert torch.equal(third["weight"], model.weight)
    assert memory.size_bytes == 4 * (4 * 3 + 2)
    model.bias = None
    capture_states({"model": model}, 4, memory)
    assert memory.size_bytes == 4 * 4 * 3, "memory that is not needed is kept"


def with_a_sparse_tensor(model: nn.Module) -> None:
    model.register_buffer("other", torch.eye(2).to_sparse())


def with_a_quantized_tensor(model: nn.Module) -> None:
    model.register_buffer("other", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def with_a_nested_tensor(model: nn.Module) -> None:
    model.register_buffer("other", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.parametrize("prepare", [with_a_sparse_tensor, with_a_quantized_tensor, with_a_nested_tensor])
@pytest.mark.filterwarnings("ignore")  # torch's, about such tensors
def test_unusual_tensors_are_copied_as_they_are(prepare: Callable[[nn.Module], None]) -> None:
    model, memory = nn.Linear(3, 2), CopyMemory()
    prepare(model)
    for step in range(3):
        copy = capture_states({"model": model}, step, memory)["shared"]["model"]["other"]
        assert str(copy) == str(model.other)
        assert copy is not model.other


def test_a_copy_in_inference_mode_does_not_hinder_the_next() -> None:
    model, memory = nn.Linear(3, 2), CopyMemory()
    with torch.inference_mode():
        capture_states({"model": model}, 1, memory)
    nn.init.constant_(model.weight, 7)
    for mode in (False, True):
        with torch.inference_mode(mode=mode):
            copy = capture_states({"model": model}, 2, memory)["shared"]["model"]
        assert torch.equal(copy["weight"], model.weight)


def test_names_that_look_alike_are_different_places() -> None:
    class Odd(nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> dict[Any, Any]:
            return {
                "a/b": torch.zeros(2),
                "a": {"b": torch.ones(2)},
                0: torch.full((2,), 2.0),
                "0": torch.full((2,), 3.0),
            }

    copy = capture_states({"model": Odd()}, 1, CopyMemory())["shared"]["model"]
    assert [float(each[0]) for each in (copy["a/b"], copy["a"]["b"], copy[0], copy["0"])] == [0, 1, 2, 3]


def run_in(directory: Path, program: str) -> "subprocess.CompletedProcess[str]":
    for name in ("snapshots", "heartbeats"):
        (directory / name).mkdir(parents=True)
    return run_forked(
        program, directory=directory, **agent_variables(directory / "run"),
        TORCHRELAY_SNAPSHOTS=str(directory / "snapshots"),
    )  # fmt: skip


COST = """
import time
import torch
import torchrelay
from torchrelay import saved_state

def burn(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass

def capture(*arguments):
    burn(0.2)
    return capture_states(*arguments)

def save(*arguments):
    burn(0.3)

capture_states, saved_state.capture_states, saved_state.Snapshots.save = saved_state.capture_states, capture, save
with torchrelay.state(model=torch.nn.Linear(2, 2), checkpoint_seconds=1000, snapshot_seconds=0.001) as saved:
    saved.step = 1
    saved.save(durable=False)
    saved._background.wait()
    assert saved._cost_seconds >= 0.5, saved._cost_seconds
"""


def test_the_cost_of_a_snapshot_is_that_of_its_copy_and_of_its_write(tmp_path: Path) -> None:
    ran = run_in(tmp_path, COST)
    assert ran.returncode == 0, ran.stderr


SCRIPT = """
import threading
import torch
import torchrelay
from torchrelay import saved_state
from torchrelay.object_states import serialized

model = torch.nn.Linear(2, 2)
may_write, writes = threading.Event(), threading.Event()

def late(content):
    writes.set()
    assert may_write.wait(60)
    return serialized(content)

saved_state.serialized = late
with torchrelay.state(model=model, checkpoint_seconds=0, snapshot_seconds=0.001) as saved:
    torch.nn.init.constant_(model.weight, 1)
    saved.step = 1
    saved.save(durable=True)
    assert writes.wait(60)
    torch.nn.init.constant_(model.weight, 2)
    saved.step = 2
    saved.save(durable=False)
    may_write.set()
    saved._background.wait()
    torch.nn.init.constant_(model.weight, 3)
    saved.step = 3
    saved.save(durable=False)
"""


def test_a_save_does_not_change_the_copy_that_is_still_being_written(tmp_path: Path) -> None:
    ran = run_in(tmp_path, SCRIPT)
    assert ran.returncode == 0, ran.stderr
    checkpoints = {step_of(path): read(path) for path in list_checkpoints(tmp_path / "run/checkpoints")}
    assert {step: float(saved["shared"]["model"]["weight"][0, 0]) for step, saved in checkpoints.items()} == {
        1: 1,
        3: 3,
    }
    [snapshot] = list_checkpoints(tmp_path / "snapshots")
    assert (step_of(snapshot), float(read(snapshot)["shared"]["model"]["weight"][0, 0])) == (3, 3)
