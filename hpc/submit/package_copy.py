"""Our three packages in each run's directory: one copy of a version in a runs directory, and hard links to it.

Two hundred small files for each run would cost inodes and, on a parallel file system, seconds. Runs on the login node.
"""

import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.ownership import others_may_write, user_name
from hpc.core.rundir import RunDir

_PACKAGES = ("hpc", "jobs", "training")
_READ_ONLY = 0o444


def copy_packages(run: RunDir) -> None:
    """Put our packages into a run, as links to the kept copy of this version if there is one.

    Raises:
        UserError: others can change the kept copies.
    """
    source = Path(__file__).parents[2]
    kept = _store(run.path.parent) / _version(source)
    if kept.is_dir():
        with suppress(FileNotFoundError):
            _link_packages(kept, run.packages)
        if kept.is_dir():
            return
        shutil.rmtree(run.packages, ignore_errors=True)  # hpc clean has removed it meanwhile
    for package in _PACKAGES:
        shutil.copytree(source / package, run.packages / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in run.packages.rglob("*"):
        # Read-only, because what is changed in one run would change in all.
        path.chmod(path.stat().st_mode & 0o755 if path.is_dir() else _READ_ONLY)


def keep_packages(run: RunDir) -> None:
    """Keep a run's packages for the next runs of this version.

    Not before the run is submitted: what is refused leaves nothing behind.
    """
    store = _store(run.path.parent)
    kept = store / _version(run.packages)
    if kept.is_dir():
        return
    store.mkdir(mode=0o700, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=store))
    _link_packages(run.packages, new / kept.name)
    try:
        (new / kept.name).rename(kept)
    except OSError:
        if not kept.is_dir():  # else another submission was faster
            raise
    finally:
        shutil.rmtree(new)


@dataclass(frozen=True, kw_only=True)
class PackageCopy:
    """A kept copy of our packages."""

    path: str
    size: int
    """Bytes that its removal frees."""


def unused_copies(runs_dir: Path, gone: Iterable[RunDir] = ()) -> list[PackageCopy]:
    """The user's kept copies in a directory of runs that no run has, without that of this version.

    Args:
        runs_dir: the directory.
        gone: runs that no longer count.

    Raises:
        UserError: others can change the copies.
    """
    store, found = _store(runs_dir), list[PackageCopy]()
    if not store.is_dir():
        return []
    current = _version(Path(__file__).parents[2])
    links = Counter(path.stat().st_ino for run in gone for path in _files(run.packages))
    for kept in sorted(store.iterdir()):
        if kept.name != current and not kept.name.startswith("."):
            files = [path.stat() for path in _files(kept)]
            if all(file.st_nlink - links[file.st_ino] <= 1 for file in files):
                found.append(PackageCopy(path=str(kept), size=sum(file.st_blocks * 512 for file in files)))
    return found


def _store(runs_dir: Path) -> Path:
    """The directory of the kept copies in a runs directory, one for each user."""
    store = runs_dir / f".packages-{os.getuid()}"
    if os.path.lexists(store):
        status = store.lstat()
        if status.st_uid != os.getuid() or others_may_write(status) or store.is_symlink():
            raise UserError(
                f"{store} belongs to {user_name(status.st_uid)} and has mode {status.st_mode & 0o777:o}, so others "
                "could change what runs as you: remove it, or use a --runs-dir of your own"
            )
    return store


def _version(directory: Path) -> str:
    """A digest of the names and contents of our packages in a directory."""
    digest = hashlib.sha256()
    for path in sorted(_files(directory)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _files(directory: Path) -> list[Path]:
    paths = (path for package in _PACKAGES for path in (directory / package).rglob("*"))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def _link_packages(source: Path, target: Path) -> None:
    for path in _files(source):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, new)
        except OSError:
            # Where quotas are by directory, a file cannot be in two.
            shutil.copy2(path, new)
