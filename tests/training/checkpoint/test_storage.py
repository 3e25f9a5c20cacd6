"""Checkpoints: complete or not there, and the newest intact one is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc.core.errors import TorchrelayError
from hpc.core.files import publish_directory, remove_temporaries
from training.checkpoint.storage import list_checkpoints, read_checkpoint, reject, save_checkpoint, step_of

FILES = {"state.safetensors": b"x" * 5000, "state.json": b'{"step": 1}'}


def writing(files: dict[str, bytes]) -> Callable[[Path], None]:
    """What writes these files into a directory."""

    def write(directory: Path) -> None:
        for name, data in files.items():
            (directory / name).write_bytes(data)

    return write


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", 7, writing(FILES), keep=2)
    assert list_checkpoints(tmp_path / "checkpoints") == [path]
    assert (path.name, step_of(path)) == ("step-00000007", 7)
    assert read_checkpoint(path) == FILES


def test_the_newest_ones_are_kept_whatever_the_number_of_digits(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save_checkpoint(tmp_path, step, writing(FILES), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000001", "step-100000000"]


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nothing") == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("state.safetensors", truncate, "state.safetensors is not as it was written"),
        ("state.safetensors", flip_a_bit, "state.safetensors is not as it was written"),
        ("state.json", flip_a_bit, "state.json is not as it was written"),
        ("state.json", Path.unlink, "FileNotFoundError"),
        ("manifest.json", Path.unlink, "FileNotFoundError"),
        ("manifest.json", truncate, "JSONDecodeError"),
        (".", lambda path: [file.unlink() for file in path.iterdir()], "FileNotFoundError"),
        ("manifest.json", lambda path: path.write_text("[]"), "TypeError"),
    ],
)
def test_a_damaged_one_is_recognised(tmp_path: Path, file: str, damage: Callable[[Path], object], reason: str) -> None:
    path = save_checkpoint(tmp_path, 20, writing(FILES), keep=2)
    damage(path / file)
    said = read_checkpoint(path)
    assert isinstance(said, str)
    assert reason in said


def test_what_the_storage_does_not_give_is_not_taken_for_damaged(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 20, writing(FILES), keep=2)
    unreadable = path / "state.json"
    unreadable.unlink()
    unreadable.symlink_to(unreadable)  # too many levels of symbolic links, for root too
    with pytest.raises(TorchrelayError, match=r"step-00000020 cannot be read .*: start the run again when it can"):
        read_checkpoint(path)


def test_a_damaged_one_is_deleted_only_after_a_new_one_is_there(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, step, writing(FILES), keep=2)
    reject(tmp_path / "step-00000020")
    assert names(tmp_path) == ["rejected-step-00000020", "step-00000010"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010"]
    save_checkpoint(tmp_path, 20, writing(FILES), keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_what_cannot_be_written_leaves_the_old_ones_and_nothing_else(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writing(FILES), keep=1)
    (tmp_path / "state").mkdir()
    with pytest.raises(FileNotFoundError):
        save_checkpoint(tmp_path, 20, writing({**FILES, "no/such/directory": b""}), keep=1)
    assert names(tmp_path) == ["state", "step-00000010"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writing(FILES), keep=2)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000020.0123abcd.tmp")
    remove_temporaries(tmp_path, "step-*")
    assert names(tmp_path) == ["step-00000010"]


def test_a_directory_that_stepped_aside_for_nothing_comes_back(tmp_path: Path) -> None:
    publish_directory(tmp_path / "best", writing({"result.json": b"{}"}))
    (tmp_path / "best").rename(tmp_path / ".best.0123abcd.old")
    remove_temporaries(tmp_path, "best")
    assert json.loads((tmp_path / "best" / "result.json").read_text()) == {}


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    publish_directory(tmp_path / "best", writing({"old.txt": b"old"}))
    publish_directory(tmp_path / "best", writing({"new.txt": b"new"}))
    assert names(tmp_path) == ["best"]
    assert names(tmp_path / "best") == ["new.txt"]
