"""When an agent takes its run directory for gone: on storage that works, and only then."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import mounted_volume
from support.events import claimed, write_events
from support.waiting import wait_for

from hpc.run.events.history import History
from hpc.run.rundir import RunDir
from jobs.control import run_dir_watch
from jobs.control.run_dir_watch import RunDirGoneError, RunDirWatch


def begun(path: Path, secret: str = "s") -> RunDir:
    run = RunDir(path)
    write_events(run, claimed(secret=secret), file="attempt-001-node-00.jsonl")
    return run


def watching(run: RunDir) -> RunDirWatch:
    return RunDirWatch(run, History.load(run).attempts[0])


def replace(path: Path) -> None:
    shutil.rmtree(path)
    begun(path, "another")


@pytest.mark.parametrize(
    "harm",
    [
        shutil.rmtree,
        lambda path: path.rename(path.with_name("new-name")),
        lambda path: path.parent.rename(path.parent.with_name("new-name")),
        lambda path: shutil.rmtree(path / "events"),
        replace,
    ],
    ids=["deleted", "renamed", "in a directory that was renamed", "deleted in part", "replaced by another run"],
)
def test_run_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object]) -> None:
    monkeypatch.setattr(run_dir_watch, "_LOOK_SECONDS", 0.01)
    watch = watching(begun(tmp_path / "runs" / "r"))
    assert not watch.is_missing()
    watch.check()
    harm(tmp_path / "runs" / "r")

    def is_noticed() -> bool:
        try:
            watch.check()
        except RunDirGoneError as error:
            return "runs/r was deleted, moved or replaced" in str(error)
        return False

    wait_for(is_noticed)


def test_storage_that_is_away_is_not_a_deletion(tmp_path: Path) -> None:
    with mounted_volume(tmp_path / "volume", "size=10m") as volume:
        watch = watching(begun(volume / "runs" / "r"))
        assert not watch.is_missing()
    assert list(volume.iterdir()) == []
    assert not watch.is_missing(), "the file system is not mounted"
    volume.rmdir()
    assert not watch.is_missing(), "as an automounter removes its directory"


def test_events_that_cannot_be_read_are_not_a_deletion(tmp_path: Path) -> None:
    run = begun(tmp_path / "r")
    watch = watching(run)
    [claim] = run.events.iterdir()
    claim.write_text('{"event":"cla')
    assert not watch.is_missing()
    claim.unlink()
    claim.symlink_to(claim.name)
    assert not watch.is_missing(), "ELOOP, as any error but ENOENT"
