"""Checkpoints on the disk: complete or absent, with damage found."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from torchrelay.checkpoint_files import (
    find_damage,
    find_published,
    list_checkpoints,
    manifest_entries,
    publish_checkpoint,
    publish_directory,
    reject,
    remove_unpublished,
    save_checkpoint,
    step_of,
    unpublished_name,
)

FILES = {"state.safetensors": b"x" * 5000, "state.json": b'{"step": 1}'}


def writing(files: dict[str, bytes]) -> Callable[[Path], None]:
    """A function that writes these files into a directory."""

    def write(directory: Path) -> None:
        for name, data in files.items():
            (directory / name).write_bytes(data)

    return write


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_read_as_it_was_written_and_has_the_files_of_other_releases(tmp_path: Path) -> None:
    """Their names, and the form of the manifest, are a contract."""
    checkpoints = tmp_path / "checkpoints"
    assert list_checkpoints(checkpoints) == []
    path = save_checkpoint(checkpoints, 7, writing(FILES), keep=None)
    assert list_checkpoints(checkpoints) == [path]
    assert (path.name, step_of(path), path.stat().st_mode & 0o777) == ("step-00000007", 7, 0o700)
    assert find_damage(path) == ""
    assert names(path) == ["manifest.json", "state.json", "state.safetensors"]
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    files = {name: {"size": len(data), "sha256": digests[name]} for name, data in FILES.items()}
    assert json.loads((path / "manifest.json").read_text()) == {"step": 7, "files": files}


def test_files_of_others_are_described_by_those_who_wrote_them_and_checked_together(tmp_path: Path) -> None:
    """With FSDP, each rank writes its shards, and checks them."""

    temporary = unpublished_name(tmp_path / "step-00000007")
    temporary.mkdir()
    writing(FILES)(temporary)
    path = publish_checkpoint(temporary, 7, 2, described={"state.json": {"size": 1, "sha256": "of rank 3"}})
    assert list(manifest_entries(path)) == ["state.json", "state.safetensors"]
    assert "state.json is not as it was written" in find_damage(path)
    assert [bool(find_damage(path, rank, 2)) for rank in range(2)] == [True, False]


def test_the_newest_are_kept_for_any_number_of_digits(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save_checkpoint(tmp_path, step, writing(FILES), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000001", "step-100000000"]


def test_a_copy_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 10, writing(FILES), keep=1)
    shutil.copytree(path, tmp_path / "step-00000010.bak")
    assert list_checkpoints(tmp_path) == [path]
    save_checkpoint(tmp_path, 20, writing(FILES), keep=1)
    assert names(tmp_path) == ["step-00000010.bak", "step-00000020"]


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
        ("state.json", Path.unlink, "FileNotFoundError"),
        ("manifest.json", Path.unlink, "FileNotFoundError"),
        ("manifest.json", truncate, "JSONDecodeError"),
        ("manifest.json", lambda path: path.write_text("[]"), "TypeError"),
        ("manifest.json", lambda path: path.write_text('{"files": []}'), "AttributeError"),
    ],
)
def test_damage_is_found(tmp_path: Path, file: str, damage: Callable[[Path], object], reason: str) -> None:
    path = save_checkpoint(tmp_path, 20, writing(FILES), keep=2)
    damage(path / file)
    assert reason in find_damage(path)


def test_a_rejected_checkpoint_is_deleted_after_the_next_is_written(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, step, writing(FILES), keep=2)
    reject(tmp_path / "step-00000020")
    assert names(tmp_path) == ["rejected-step-00000020", "step-00000010"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010"]
    save_checkpoint(tmp_path, 20, writing(FILES), keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


KILLED_IN_THE_MIDDLE = """
import os, shutil, signal, sys
from pathlib import Path
from torchrelay.checkpoint_files import remove_published, save_checkpoint
from torchrelay.saving.restoring import remove_newer

def remove_a_file_and_die(path, **_):
    (path / "state.json").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

shutil.rmtree = remove_a_file_and_die
directory = Path(sys.argv[1])
"""


@pytest.mark.parametrize(
    "removal",
    [
        "save_checkpoint(directory, 30, lambda path: (path / 'state.json').write_text('{}'), keep=1)",
        "remove_newer(directory, 10)",
        "remove_published(directory / 'step-00000020')",
    ],
)
def test_a_removal_that_is_killed_leaves_nothing_incomplete(tmp_path: Path, removal: str) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, step, writing(FILES), keep=2)
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_THE_MIDDLE + removal, tmp_path], check=False)
    assert killed.returncode == -signal.SIGKILL
    visible = list_checkpoints(tmp_path)
    hidden = set(names(tmp_path)) - {path.name for path in visible}
    assert len(hidden) == 1, "the removal was not under way"
    assert visible
    assert not any(map(find_damage, visible))
    remove_unpublished(tmp_path, "step-*")
    assert names(tmp_path) == sorted(path.name for path in visible)


def test_leftovers_of_killed_writers_are_removed_and_what_they_moved_aside_is_restored(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writing(FILES), keep=2)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000020.0123abcd.tmp")
    remove_unpublished(tmp_path, "step-*")
    assert names(tmp_path) == ["step-00000010"]
    for name in ("old", "new"):
        publish_directory(tmp_path / "best", writing({f"{name}.txt": b"{}"}))
    assert names(tmp_path / "best") == ["new.txt"], "it is replaced whole"
    (tmp_path / "best").rename(tmp_path / ".best.0123abcd.old")
    remove_unpublished(tmp_path, "best")
    assert names(tmp_path) == ["best", "step-00000010"]
    assert names(tmp_path / "best") == ["new.txt"]


KILLED_WHILE_IT_PUBLISHES = """
import os, shutil, signal, sys
from pathlib import Path
from torchrelay.checkpoint_files import publish

temporary, path, moment = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def or_die(act):
    def act_or_die(*args, **others):
        global moment
        if moment == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        moment -= 1
        return act(*args, **others)
    return act_or_die

os.rename, os.unlink, os.rmdir = map(or_die, (os.rename, os.unlink, os.rmdir))
publish(temporary, path)
"""


def make(path: Path, kind: str, text: str) -> None:
    if kind == "file":
        path.write_text(text)
    else:
        (path / "inner").mkdir(parents=True)
        for name in ("a", "inner/b"):
            (path / name).write_text(text)


def text_of(path: Path) -> str:
    """The text that a file or the two files of a directory have in common."""
    texts = [path.read_text()] if path.is_file() else [(path / name).read_text() for name in ("a", "inner/b")]
    assert len({*texts}) == 1
    return texts[0]


@pytest.mark.parametrize("new", ["file", "directory"])
@pytest.mark.parametrize("old", ["file", "directory"])
def test_a_kill_while_a_file_or_directory_is_replaced_leaves_the_old_or_the_new_one(
    tmp_path: Path, old: str, new: str
) -> None:
    for moment in count():
        directory = tmp_path / str(moment)
        directory.mkdir()
        path = directory / "lightning.ckpt"
        make(path, old, "old")
        make(temporary := unpublished_name(path), new, "new")
        words = [sys.executable, "-c", KILLED_WHILE_IT_PUBLISHES, temporary, path, str(moment)]
        done = subprocess.run(words, check=False)
        assert done.returncode in {0, -signal.SIGKILL}
        whole = find_published(path)
        assert whole
        text = text_of(whole)
        assert text in ({"old", "new"} if done.returncode else {"new"})
        remove_unpublished(directory, path.name)
        assert (names(directory), text_of(path)) == ([path.name], text)
        if done.returncode == 0:
            break
    assert find_published(tmp_path / "absent") is None
