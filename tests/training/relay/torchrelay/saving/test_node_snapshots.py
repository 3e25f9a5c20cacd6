"""A rank writes the files of its snapshots again: what is kept must not change, and what is removed must not matter."""

import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchrelay.checkpoint_files import (
    STATE_TENSORS,
    checkpoint_path,
    find_damage,
    list_checkpoints,
    save_checkpoint,
    step_of,
)
from torchrelay.saving.node_snapshots import SnapshotFiles
from torchrelay.saving.tensor_files import Image, TensorLayout, part_of, read_whole_tensors


def state(step: int) -> dict[str, Tensor]:
    return {
        "model/image": torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "model/half": torch.full((5,), step, dtype=torch.bfloat16),
        "model/count": torch.tensor(step),
        "model/flags": torch.tensor([True, False, True]),
        "model/empty": torch.zeros(0, 3),
        "optimizer/step": torch.tensor(7.0, dtype=torch.float64),
    }


def fill(files: SnapshotFiles, tensors: dict[str, Tensor]) -> Image:
    parts = {name: part_of(value) for name, value in tensors.items()}
    layout = TensorLayout.of({name: (part.tensor.dtype, part.block) for name, part in parts.items()})
    image = files.image(layout.size_bytes)
    image.fill(layout, parts)
    return image


def save(files: SnapshotFiles, step: int, tensors: dict[str, Tensor]) -> None:
    fill(files, tensors)
    files.publish(step, {})


def steps_in(directory: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(directory)]


def assert_saved(directory: Path, step: int, tensors: dict[str, Tensor]) -> None:
    path = checkpoint_path(directory, step)
    assert find_damage(path) == ""
    for found in (load_file(path / STATE_TENSORS), read_whole_tensors(path)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
        assert all(found[name].dtype == value.dtype for name, value in tensors.items())


def test_two_files_are_written_in_turn_and_the_newest_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    files, states, seen = SnapshotFiles(tmp_path), [state(step) for step in range(8)], list[int]()
    for step, tensors in enumerate(states):
        save(files, step, tensors)
        seen.append((checkpoint_path(tmp_path, step) / STATE_TENSORS).stat().st_ino)
        assert steps_in(tmp_path) == [step, step - 1][: step + 1]
        for kept in {max(step - 1, 0), step}:
            assert_saved(tmp_path, kept, states[kept])
        # The next state is on its way into its file, whose snapshot is no more published.
        fill(files, state(99))
        assert steps_in(tmp_path) == [step]
        assert_saved(tmp_path, step, tensors)
    assert len(set(seen)) == 2
    assert seen[2:] == seen[:-2]


def test_the_snapshots_of_an_earlier_attempt_are_removed_and_not_written_again(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / STATE_TENSORS).write_bytes(b"of another process, which may still map it")

    for step in (1, 2):
        save_checkpoint(tmp_path, step, write, keep=2)
    old = [(path / STATE_TENSORS).open("rb") for path in list_checkpoints(tmp_path)]
    files = SnapshotFiles(tmp_path)
    fill(files, state(3))
    assert steps_in(tmp_path) == [2], "together with the next one, more than two"
    for step in range(3, 8):
        save(files, step, state(step))
    assert {file.read() for file in old} == {b"of another process, which may still map it"}
    for file in old:
        file.close()
    assert steps_in(tmp_path) == [7, 6]


@pytest.mark.parametrize("what", ["all", "files", "published", "unpublished"])
def test_snapshots_go_on_after_somebody_has_removed_them(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "memory" / "snapshots"
    files = SnapshotFiles(directory)
    for step in range(4):
        save(files, step, state(step))
    fill(files, state(4))
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
    assert steps_in(directory) == [8, 7]
    assert len(list(directory.iterdir())) == 2, "something is left"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())} == {0o700}


def test_a_snapshot_that_cannot_be_published_leaves_the_newest_and_can_be_saved_again(tmp_path: Path) -> None:
    files, tensors = SnapshotFiles(tmp_path), state(4)
    for step in range(4):
        save(files, step, state(step))

    for others, message in (({"no/such/directory": b""}, "No such file"), ({}, "was removed")):
        fill(files, tensors)
        if not others:
            next(tmp_path.glob(f".*/{STATE_TENSORS}")).unlink()
        with pytest.raises(OSError, match=message):
            files.publish(4, others)
        assert steps_in(tmp_path) == [3]
    save(files, 4, tensors)
    assert_saved(tmp_path, 4, tensors)
    assert steps_in(tmp_path) == [4, 3]
    assert len(list(tmp_path.iterdir())) == 2


def maps() -> int:
    """How many files of snapshots this process has mapped."""
    return Path("/proc/self/maps").read_text().count(STATE_TENSORS)


def test_the_memory_of_removed_files_is_freed(tmp_path: Path) -> None:
    directory = tmp_path / "snapshots"
    files, before = SnapshotFiles(directory), maps()
    for step in range(4):
        save(files, step, state(step))
    assert maps() == before + 2
    shutil.rmtree(directory)
    directory.touch()
    with pytest.raises(OSError, match="directory"):
        fill(files, state(4))
    assert maps() == before
