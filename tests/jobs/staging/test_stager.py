"""Staging on one node: real directories, real locks, real kills, a real full disk."""

import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import mounted_volume, need
from support.staging_nodes import contents, stage

from hpc.base.errors import TorchrelayError, UserError
from jobs.staging.coordination import StagingGroup, StagingPlan
from jobs.staging.copy_progress import CancellableWait, CopyProgress, StagingStopped, Watch
from jobs.staging.stager import Staged, Stager
from jobs.staging.store import CacheStore, open_store, write_manifest

MB = 2**20
ROOT = Path(__file__).parents[3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Several batches: a file of several pieces, small ones, an empty one, names that need quotes."""
    path = tmp_path / "data set; $x 'y'"
    (path / "train" / "a\udcff").mkdir(parents=True)
    (path / "train" / "a\udcff" / "1.png").write_bytes(os.urandom(100_000))
    (path / "train" / "empty").write_bytes(b"")
    (path / "large").write_bytes(os.urandom(5 * MB + 1))
    (path / "run.sh").write_bytes(b"#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    return path


@pytest.fixture
def store(local: Path) -> CacheStore:
    return open_store(local)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB, in memory."""
    with mounted_volume(tmp_path / "small", "size=24m,mode=1777") as path:
        yield path


def leftovers(stage_dir: Path) -> list[str]:
    return [path.name for path in stage_dir.glob("torchrelay-*/.*")]


def stage_watched(source: Path, stage_dir: Path, watch: Watch, keep_seconds: float = float("inf")) -> Staged:
    with Stager(stage_dir, watch=watch, keep_seconds=keep_seconds) as stager:
        return stager.stage(source)


def test_copy_equals_source_and_is_used_again(source: Path, local: Path) -> None:
    first = stage(source, local)
    assert not first.reused
    assert first.path.is_relative_to(local)
    assert contents(first.path) == contents(source)
    assert first.bytes_from_source == sum(map(len, contents(source).values()))
    assert (first.path / "run.sh").stat().st_mode & 0o777 == 0o700
    assert (local / f"torchrelay-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    second = stage(source, local)
    assert (second.reused, second.path, second.bytes_from_source) == (True, first.path, 0)
    assert leftovers(local) == []


def test_directories_without_files_are_kept(source: Path, local: Path) -> None:
    (source / "train" / "b" / "c").mkdir(parents=True)
    copy = stage(source, local).path
    assert (copy / "train" / "b" / "c").is_dir()
    (copy / "train" / "b" / "c").rmdir()
    assert (stage(source, local).path / "train" / "b" / "c").is_dir()
    (source / "train" / "d").mkdir()
    assert stage(source, local).path != copy, "a class more is another data set"


def test_another_name_of_the_same_source_is_the_same_copy(source: Path, local: Path) -> None:
    copy = stage(source, local).path
    assert stage(source.parent / "x" / ".." / source.name, local).path == copy


@pytest.mark.parametrize("name", ["a" * 255, "a" + "数" * 84, "." * 100 + "b" * 155, "a" * 150 + "\udcff", "\udcff.a"])
def test_source_may_have_any_name_that_its_storage_allows(name: str, source: Path, local: Path) -> None:
    source = source.rename(source.with_name(name))
    copy = stage(source, local)
    assert (copy.in_place, contents(copy.path)) == (None, contents(source))
    assert not copy.path.parent.name.startswith(".")
    assert copy.path.parent.name.encode(), "it is UTF-8"
    assert stage(source, local).reused


@pytest.mark.parametrize("heartbeat", [1, 2**33])
def test_process_that_stalls_with_the_copy_is_not_waited_for(
    source: Path, local: Path, store: CacheStore, monkeypatch: pytest.MonkeyPatch, heartbeat: int
) -> None:
    """Also if its last heartbeat is in the future: the clock was set back."""
    monkeypatch.setattr("jobs.staging.store._STALLED_SECONDS", 0.2)
    entry = store.entry(stage(source, local).path.parent.name)
    waiting = CancellableWait(lambda _: False)
    with ExitStack() as in_use, entry.locked(waiting, in_use, waiting.wait):
        os.utime(store.locks / f"{entry.name}.copy", (heartbeat, heartbeat))
        staged = stage(source, local)
    assert staged.path == source
    assert "has stalled" in str(staged.in_place)


def test_damaged_copy_gives_its_room_to_the_new_one(tmp_path: Path, small_disk: Path) -> None:
    source = tmp_path / "much"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(13 * MB))
    (source / "small").write_bytes(b"s")
    copy = stage(source, small_disk).path
    (copy / "small").unlink()
    assert not stage(source, small_disk).reused
    assert contents(copy) == contents(source)


def test_links_are_followed_and_one_in_a_circle_is_refused(source: Path, local: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "image").write_bytes(b"i")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    assert contents(stage(source, local).path)["linked/image"] == b"i"
    (source / "train" / "circle").symlink_to(source)
    with pytest.raises(TorchrelayError, match=r"circle is a symlink to a directory above it: remove it"):
        stage(source, local)


def test_special_files_are_refused(source: Path, local: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(UserError, match=r"pipe is not a regular file \(prw-r--r--\): remove it"):
        stage(source, local)
    (source / "pipe").unlink()
    (source / "gone").symlink_to("nowhere")
    with pytest.raises(TorchrelayError, match=r"gone cannot be listed \(No such file or directory\)"):
        stage(source, local)


@pytest.mark.parametrize("damage", ["missing", "truncated", "without a manifest"])
def test_copy_with_missing_files_is_made_again(source: Path, local: Path, damage: str) -> None:
    staged = stage(source, local).path / "train" / "a\udcff" / "1.png"
    if damage == "without a manifest":
        (staged.parents[3] / "manifest").unlink()
    else:
        staged.unlink() if damage == "missing" else os.truncate(staged, 10)
    again = stage(source, local)
    assert not again.reused
    assert contents(again.path) == contents(source)
    assert stage(source, local).reused


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4 * MB] ^= 1
    path.write_bytes(content)


def test_copy_that_was_changed_is_replaced(source: Path, local: Path) -> None:
    with Stager(local) as user:  # somebody reads the copy meanwhile
        copy = user.stage(source).path
        flip_a_byte(copy / "large")
        os.utime(copy / "large", (0, 0))
        assert not stage(source, local).reused
        assert contents(copy) == contents(source)
    (copy / "large").chmod(0o400)
    assert stage(source, local).reused, "its content is the same"


def test_copy_from_before_a_power_cut_is_read_before_it_is_trusted(
    source: Path, local: Path, store: CacheStore
) -> None:
    copy = stage(source, local).path
    [entry] = store.entries()
    manifest = entry.manifest()
    assert manifest is not None

    def damage(boot: str) -> None:
        """Damage the copy as a disk does, so that no time tells."""
        flip_a_byte(copy / "large")
        write_manifest(entry.path, replace(manifest, boot=boot))
        os.utime(entry.path / "manifest", (time.time() + 60,) * 2)

    damage(manifest.boot)
    assert stage(source, local).reused, "times do not tell"
    write_manifest(entry.path, replace(manifest, boot="an earlier one"))
    assert not stage(source, local).reused
    assert contents(copy) == contents(source)
    write_manifest(entry.path, replace(manifest, boot="an earlier one"))
    assert stage(source, local).reused, "intact, so its boot id was updated"
    damage(manifest.boot)
    assert stage(source, local).reused, "and is not read again"


def at_first_byte(act: Callable[[], bool]) -> Watch:
    """Do something as soon as a part has been copied."""

    def watch(progress: CopyProgress | None) -> bool:
        return bool(progress and progress.bytes_done and act())

    return watch


def test_stop_in_the_middle_of_a_copy(source: Path, local: Path) -> None:
    with pytest.raises(StagingStopped):
        stage_watched(source, local, at_first_byte(lambda: True))
    assert leftovers(local) == []
    assert contents(stage(source, local).path) == contents(source)


def test_disk_that_fills_up_on_the_way_means_reading_in_place(source: Path, small_disk: Path) -> None:
    def fill() -> bool:
        done = subprocess.run(["cp", "/dev/zero", str(small_disk / "filler")], capture_output=True, check=False)
        assert b"No space left" in done.stderr
        return False

    (source / "more").write_bytes(os.urandom(14 * MB))
    staged = stage_watched(source, small_disk, at_first_byte(fill))
    assert staged.path == source
    assert str(staged.in_place).endswith("filled up during the copy")
    assert leftovers(small_disk) == []
    assert open_store(small_disk).entries() == []
    (small_disk / "filler").unlink()
    again = stage(source, small_disk)
    assert again.in_memory
    assert contents(again.path) == contents(source)


def test_data_that_do_not_fit_are_read_in_place(tmp_path: Path, source: Path, small_disk: Path) -> None:
    kept = stage(source, small_disk)
    large = tmp_path / "large"
    large.mkdir()
    (large / "file").write_bytes(bytes(30 * MB))
    staged = stage(large, small_disk)
    assert staged.path == large
    assert "(RAM-backed) has" in str(staged.in_place)
    assert contents(kept.path) == contents(source), "nothing is deleted where it would not help"


def test_least_recently_used_copies_make_room_but_none_in_use(tmp_path: Path, small_disk: Path) -> None:
    def data(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "file").write_bytes(os.urandom(6 * MB))
        return path

    sources = {name: data(name) for name in ("first", "second", "third", "fourth")}
    with Stager(small_disk) as user:
        used = user.stage(sources["first"])
        second = stage(sources["second"], small_disk)
        third = stage(sources["third"], small_disk)
        assert stage(sources["second"], small_disk).reused
        stage(sources["fourth"], small_disk)
        assert [path.exists() for path in (used.path, second.path, third.path)] == [True, True, False]


def test_old_copies_are_deleted_and_with_keep_0_the_own_one(tmp_path: Path, source: Path, local: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(b"x")
    old = stage(other, local)
    os.utime(old.path.parent, (1, 1))
    staged = stage_watched(source, local, lambda _: False, keep_seconds=3600)
    assert not old.path.exists()
    assert staged.path.exists()
    stage_watched(source, local, lambda _: False, keep_seconds=0)
    assert not staged.path.exists()


class Between(StagingGroup):
    """Does something between the listing and the reading."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def plan(self) -> StagingPlan | None:
        self._act()
        return super().plan()


def test_source_that_changes_during_the_copy_is_refused(source: Path, local: Path) -> None:
    def change() -> None:
        (source / "large").write_bytes(os.urandom(5 * MB + 1))

    with (
        pytest.raises(TorchrelayError, match=r"large was changed while the data were being copied: submit again"),
        Stager(local, group=Between(change)) as stager,
    ):
        stager.stage(source)
    assert leftovers(local) == []
    assert open_store(local).entries() == []
    assert contents(stage(source, local).path) == contents(source)


def test_source_that_vanishes_is_retried_and_then_named(
    source: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc.sources.source_files._RETRY_SECONDS", (0.3, 0.3))
    hidden = source.parent / "hidden"

    def hide() -> None:
        (source / "large").rename(hidden)

    with (
        pytest.raises(TorchrelayError, match=r"large could not be read .*No such file or directory\), 3 times"),
        Stager(local, group=Between(hide)) as stager,
    ):
        stager.stage(source)
    hidden.rename(source / "large")
    monkeypatch.setattr("hpc.sources.source_files._RETRY_SECONDS", (0.1,) * 300)

    def bring_back(progress: CopyProgress | None) -> bool:
        if hidden.exists() and progress is not None and time.time() - hidden.stat().st_ctime > 0.1:
            hidden.rename(source / "large")
        return False

    with Stager(local, group=Between(hide), watch=bring_back) as stager:
        assert contents(stager.stage(source).path) == contents(source)


DIES = """
import os, sys
from pathlib import Path
from jobs.staging.stager import Stager
def watch(progress):
    return bool(progress and progress.bytes_done and os.kill(os.getpid(), 9))
with Stager(Path(sys.argv[2]), watch=watch) as stager:
    stager.stage(Path(sys.argv[1]))
"""


def test_killed_copy_leaves_nothing_that_is_trusted(source: Path, local: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", DIES, str(source), str(local)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(leftovers(local)) == 1
    staged = stage(source, local)
    assert not staged.reused
    assert contents(staged.path) == contents(source)
    assert leftovers(local) == []


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


@pytest.mark.parametrize("trap", ["directory", "symlink"])
def test_names_that_another_user_has_taken_are_passed_over(
    source: Path, local: Path, tmp_path: Path, trap: str
) -> None:
    need("chown")
    taken = [local / f"torchrelay-{os.getuid()}{more}" for more in ("", "-1", "-2")]
    for path in taken:
        path.mkdir() if trap == "directory" else path.symlink_to(tmp_path)
        os.chown(path, 65534, 65534, follow_symlinks=False)
    own = local / f"torchrelay-{os.getuid()}-3"
    staged = stage(source, local)
    assert staged.path.is_relative_to(own)
    assert contents(staged.path) == contents(source)
    # The other user frees a name: the copy is found again.
    taken[1].rename(tmp_path / "freed")
    assert stage(source, local).reused


def test_directory_behind_the_link_of_another_user_is_refused(source: Path, local: Path, tmp_path: Path) -> None:
    need("chown")
    nobody, way = pwd.getpwnam("nobody"), tmp_path / "way"
    way.symlink_to(local)
    os.chown(way, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    with pytest.raises(TorchrelayError, match=r"belongs to nobody.*another --stage-dir"):
        stage(source, way)
    assert contents(local) == {}


def test_line_for_the_epilog_deletes_unused_copies(source: Path, local: Path, tmp_path: Path) -> None:
    [line] = [line for line in (ROOT / "docs/how-to/administrators.md").read_text().splitlines() if "runuser" in line]
    other = tmp_path / "other"
    other.mkdir()
    with Stager(local) as user:
        used = user.stage(source).path
        unused = stage(other, local).path
        program = shlex.split(line)[-1].replace("/tmp/", f"{local}/")
        subprocess.run(["sh", "-c", program], check=False)
        assert (used.exists(), unused.exists()) == (True, False)
    subprocess.run(["sh", "-c", program], check=True)
    assert open_store(local).entries() == []
