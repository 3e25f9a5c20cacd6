"""What runs need of the storage of their directory, and what is said where it lacks that."""

import os
import subprocess
import sys
from pathlib import Path

from support.cluster import ROOT
from support.staging_nodes import stage

from hpc.base.files import fsync_directory
from hpc.submissions.checks import lacks_hard_links

REFUSED = (sys.executable, str(ROOT / "tests" / "support" / "refused_calls.py"))
LINKS, LOCKS = ("link=EPERM", "linkat=EPERM"), ("flock=ENOSYS",)


def python_where_refused(calls: tuple[str, ...], *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python on storage that refuses some calls."""
    command = [*REFUSED, *calls, "--", sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240)


def test_runs_on_storage_without_hard_links_are_refused_at_submission(tmp_path: Path) -> None:
    flags = ("--cluster=local", "--synthetic", "--name=r")
    done = python_where_refused(LINKS, "-m", "hpc", "submit", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hpc submit: --runs-dir runs: its file system (")
    assert done.stderr.endswith(
        " has no hard links, so two jobs of a run could both train it: use a directory on other storage\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_look_for_hard_links_leaves_nothing(tmp_path: Path) -> None:
    assert not lacks_hard_links(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_flushed_end_nothing() -> None:
    fsync_directory(Path("/proc/self"))  # procfs has no fsync of directories: EINVAL


def test_stage_dir_without_locks_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").touch()
    (tmp_path / "disk").mkdir()
    staging = "from pathlib import Path; from jobs.staging.stager import Stager"
    staged = f"{staging}; print(Stager(Path('disk').absolute()).stage(Path('photos').absolute()).in_place)"
    done = python_where_refused(LOCKS, "-c", staged, cwd=tmp_path)
    assert done.stdout.startswith(f"{tmp_path}/disk/torchrelay-{os.getuid()}/locks/photos-")
    assert done.stdout.endswith(" cannot be locked: its file system has no locks (flock)\n")
    assert not stage(tmp_path / "photos", tmp_path / "disk").reused
