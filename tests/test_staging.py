"""Staging against real directories, real locks, real kills."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc import staging
from hpc.errors import TorchrelayError
from hpc.private import private_directory
from hpc.staging import StagingStopped, lock, stage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data set; $x 'y'"
    (path / "train" / "a").mkdir(parents=True)
    (path / "train" / "a" / "1.png").write_bytes(os.urandom(100_000))
    (path / "train" / "empty").write_bytes(b"")
    return path


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "local"
    path.mkdir()
    return path


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".torchrelay"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_copy_equals_source_and_is_used_again(source: Path, local: Path) -> None:
    first = stage(source, local)
    assert not first.reused
    assert first.path.is_relative_to(local)
    assert contents(first.path) == contents(source)
    second = stage(source, local)
    assert second.reused
    assert second.path == first.path
    assert stat_mode(local / f"torchrelay-{os.getuid()}") == 0o700


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_changed_source_is_another_copy(source: Path, local: Path) -> None:
    first = stage(source, local)
    (source / "train" / "b").write_bytes(b"new")
    second = stage(source, local)
    assert not second.reused
    assert contents(second.path) == contents(source)
    assert second.path != first.path


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_swept_copy_is_made_again(source: Path, local: Path, damage: str) -> None:
    staged = stage(source, local).path / "train" / "a" / "1.png"
    staged.unlink() if damage == "missing" else os.truncate(staged, 10)
    again = stage(source, local)
    assert not again.reused
    assert contents(again.path) == contents(source)


def test_copy_that_differs_from_its_source_is_refused(
    source: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip_a_bit(source: Path, target: Path, stopped: Callable[[], bool]) -> str:
        checksum = copy(source, target, stopped)
        data = bytearray(target.read_bytes())
        data[:1] = bytes([data[0] ^ 1]) if data else b""
        target.write_bytes(data)
        return checksum

    copy = staging._copy_file  # noqa: SLF001 - the disk that fails has to be put in somewhere
    monkeypatch.setattr(staging, "_copy_file", flip_a_bit)
    with pytest.raises(TorchrelayError, match=r"does not equal .*is the disk of this node failing"):
        stage(source, local)
    monkeypatch.undo()
    assert contents(stage(source, local).path) == contents(source)


def test_stop_in_the_middle_of_a_copy(source: Path, local: Path) -> None:
    with pytest.raises(StagingStopped):
        stage(source, local, lambda: True)
    assert contents(stage(source, local).path) == contents(source)


def test_stop_while_another_process_copies(source: Path, local: Path) -> None:
    root = private_directory(local)
    target = stage(source, local).path
    with lock(root / f"{target.name}.lock", lambda: False), pytest.raises(StagingStopped):
        stage(source, local, lambda: True)


def test_disk_that_fills_up_on_the_way_means_reading_in_place(
    source: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_source: Path, target: Path, _stopped: Callable[[], bool]) -> str:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "_copy_file", fill)
    staged = stage(source, local)
    assert staged.path == source
    assert staged.in_place == "[Errno 28] No space left on device"
    assert not list(private_directory(local).glob(".*"))


def test_source_that_is_not_there_is_said(tmp_path: Path, local: Path) -> None:
    with pytest.raises(TorchrelayError, match="nowhere, are not to be seen on this node"):
        stage(tmp_path / "nowhere", local)
    assert list(local.iterdir()) == []


def test_killed_copy_leaves_nothing_that_is_trusted(tmp_path: Path, local: Path) -> None:
    source = tmp_path / "slow"
    source.mkdir()
    (source / "first").write_bytes(b"1" * 1000)
    os.mkfifo(source / "second")
    code = (
        f"from pathlib import Path; from hpc.staging import stage; stage(Path({str(source)!r}), Path({str(local)!r}))"
    )
    copier = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    root = local / f"torchrelay-{os.getuid()}"
    while not list(root.glob(".*.partial/first")):
        assert copier.poll() is None
        time.sleep(0.05)
    copier.send_signal(signal.SIGKILL)
    copier.wait()
    (source / "second").unlink()
    (source / "second").write_bytes(b"2")
    staged = stage(source, local)
    assert contents(staged.path) == {"first": b"1" * 1000, "second": b"2"}


def test_two_processes_copy_once(source: Path, local: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hpc.staging import stage\n"
        "print(stage(Path(sys.argv[1]), Path(sys.argv[2])).reused)"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", code, str(source), str(local)]
    copiers = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    reused = sorted(copier.communicate(timeout=60)[0].strip() for copier in copiers)
    assert reused == ["False", "True", "True"]


def test_full_disk_means_reading_in_place(source: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(local)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _path: usage._replace(free=10))
    staged = stage(source, local)
    assert staged.path == source
    assert staged.in_place
    assert "room for 0 MB" in staged.in_place


@pytest.mark.parametrize("trap", ["symlink", "open", "file"])
def test_directory_that_others_could_use_is_refused(source: Path, local: Path, tmp_path: Path, trap: str) -> None:
    root = local / f"torchrelay-{os.getuid()}"
    if trap == "symlink":
        root.symlink_to(tmp_path)
    elif trap == "open":
        root.mkdir()
        root.chmod(0o777)
    else:
        root.write_text("")
    with pytest.raises(TorchrelayError, match="only you can use"):
        stage(source, local)
