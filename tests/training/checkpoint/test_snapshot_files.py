"""A rank writes the files of its snapshots again: what is kept must not change, and what is removed must not matter."""

import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchrelay.checkpoint_files import checkpoint_path, find_damage, list_checkpoints, save_snapshot, step_of
from training.checkpoint.host_copy import HostCopy, HostMemory
from training.checkpoint.sharded import ShardLayout
from training.checkpoint.snapshot_files import SnapshotFiles

from training.checkpoint.state import LOSS

LAYOUT = ShardLayout()


def state(step: int) -> dict[str, Tensor]:
    return {
        LOSS: torch.tensor(float(step)),
        "model/image": torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "model/half": torch.full((5,), step, dtype=torch.bfloat16),
        "model/count": torch.tensor(step),
        "model/empty": torch.zeros(0, 3),
    }


def save(files: SnapshotFiles, step: int, tensors: dict[str, Tensor], memory: HostMemory | None = None) -> None:
    copy = HostCopy()
    copy.start(tensors, {"step": step}, LAYOUT, memory or files.for_state(tensors, LAYOUT))
    files.save_state(step, copy)


def inodes(directory: Path) -> list[int]:
    return [(path / LAYOUT.file).stat().st_ino for path in list_checkpoints(directory)]


def assert_saved(directory: Path, step: int, tensors: dict[str, Tensor]) -> None:
    path = checkpoint_path(directory, step)
    assert find_damage(path) == ""
    found = load_file(path / LAYOUT.file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())


@pytest.mark.parametrize("is_direct", [True, False], ids=["copied to the file", "copied to other memory first"])
def test_three_files_are_written_in_turn_and_the_newest_two_snapshots_stay_as_they_were(
    tmp_path: Path, *, is_direct: bool
) -> None:
    files, states, seen = SnapshotFiles(tmp_path), [state(step) for step in range(8)], list[int]()
    for step, tensors in enumerate(states):
        save(files, step, tensors, None if is_direct else HostMemory().extended(tensors))
        seen.append(inodes(tmp_path)[0])
        # The next state is on its way into its file.
        following = files.for_state(tensors, LAYOUT).tensors["model/half"]
        following.fill_(-1)
        for kept in {max(step - 1, 0), step}:
            assert_saved(tmp_path, kept, states[kept])
        assert [step_of(path) for path in list_checkpoints(tmp_path)] == [step, step - 1][: step + 1]
    assert len(set(seen)) == 3
    assert seen[3:] == seen[:-3]
    assert files.are_allocated


def test_the_snapshots_of_an_earlier_attempt_are_removed_and_not_written_again(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / LAYOUT.file).write_bytes(b"of another process, which may still map it")

    for step in (1, 2):
        save_snapshot(tmp_path, step, write)
    old = [(path / LAYOUT.file).open("rb") for path in list_checkpoints(tmp_path)]
    files = SnapshotFiles(tmp_path)
    for step in range(3, 8):
        save(files, step, state(step))
    assert {file.read() for file in old} == {b"of another process, which may still map it"}
    for file in old:
        file.close()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 6]


@pytest.mark.parametrize("what", ["all", "files", "published", "unpublished"])
def test_snapshots_go_on_after_somebody_has_removed_them(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "memory" / "snapshots"
    files = SnapshotFiles(directory)
    for step in range(4):
        save(files, step, state(step))
    if what == "all":
        shutil.rmtree(tmp_path / "memory")
    elif what == "files":
        for path in directory.rglob("*.safetensors"):
            path.unlink()
    else:
        for path in directory.glob("step-*" if what == "published" else ".step-*"):
            shutil.rmtree(path)
    for step in range(4, 9):
        tensors = state(step)
        save(files, step, tensors)
        assert_saved(directory, step, tensors)
    assert [step_of(path) for path in list_checkpoints(directory)] == [8, 7]
    assert len(list(directory.iterdir())) == 3, "something is left"
    assert files.are_allocated


def test_what_is_removed_while_a_state_is_copied_is_written_to_a_new_file(tmp_path: Path) -> None:
    directory = tmp_path / "memory" / "snapshots"
    files, copy, tensors = SnapshotFiles(directory), HostCopy(), state(1)
    copy.start(tensors, {"step": 1}, LAYOUT, files.for_state(tensors, LAYOUT))
    shutil.rmtree(directory.parent)
    files.save_state(1, copy)
    assert_saved(directory, 1, tensors)
    made = (directory.parent, directory, checkpoint_path(directory, 1))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}, "others may read them"


def test_other_tensors_get_another_file(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    for step in range(4):
        save(files, step, state(step))
    more = state(4) | {"optimizer/0/exp_avg": torch.ones(3)}
    for step in range(4, 8):
        save(files, step, more)
        assert_saved(tmp_path, step, more)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_snapshot_that_cannot_be_saved_leaves_the_others_and_can_be_saved_again(tmp_path: Path) -> None:
    files, copy, tensors = SnapshotFiles(tmp_path), HostCopy(), state(4)
    for step in range(4):
        save(files, step, state(step))
    copy.start(tensors, {"not": object()}, LAYOUT, files.for_state(tensors, LAYOUT))
    with pytest.raises(TypeError):
        files.save_state(4, copy)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 2]
    assert files.are_allocated, "its file is lost"
    copy.values = {"step": 4}
    files.save_state(4, copy)
    assert_saved(tmp_path, 4, tensors)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_is_removed_while_it_is_saved_is_no_snapshot(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    for step in range(4):
        save(files, step, state(step))
    files.for_state(state(4), LAYOUT)

    def remove(directory: Path) -> None:
        (directory / LAYOUT.file).unlink()

    with pytest.raises(FileNotFoundError, match="was removed"):
        files.save(4, remove)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 2]
    save(files, 5, state(5))
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5, 3]


def maps() -> int:
    """How many files of snapshots this process has mapped."""
    return Path("/proc/self/maps").read_text().count(LAYOUT.file)


def test_the_memory_of_removed_files_is_freed(tmp_path: Path) -> None:
    directory = tmp_path / "snapshots"
    files, before = SnapshotFiles(directory), maps()
    for step in range(4):
        save(files, step, state(step))
    assert maps() == before + 3
    shutil.rmtree(directory)
    directory.touch()
    with pytest.raises(OSError, match="directory"):
        files.for_state(state(4), LAYOUT)
    assert maps() == before
