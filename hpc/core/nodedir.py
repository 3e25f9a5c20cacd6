"""Private directories on a node: one per user where everybody may write (/tmp, /dev/shm), and in it one per run.

A run's directory lies in /dev/shm, so it outlives the processes that write into it and is lost with the node. The node
agent makes it, holds its lock, and removes it; the ranks write into it. Runs on compute nodes.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.ownership import user_name, who_may_rename
from hpc.core.rundir import Below, RunDir

DEV_SHM, _TMP = Path("/dev/shm"), Path("/tmp")  # noqa: S108 - the directories below them are private
_MOST_LINKS = 10
# An agent of the previous attempt may not have exited yet.
_LOCK_TIMEOUT_SECONDS, _POLL_SECONDS = 30.0, 0.2


def private_directory(parent: Path) -> Path:
    """Our own directory `torchrelay-<uid>` in a directory that everybody can write to.

    Raises:
        TorchrelayError: other users could have made it, could replace it, or can write to it.
    """
    _check_path(parent.absolute())
    root = parent / f"torchrelay-{os.getuid()}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise TorchrelayError(
                f"{root} belongs to {user_name(status.st_uid)} and is {stat.filemode(status.st_mode)}, not a directory "
                "that only you can use, so another user may have made it: remove it, or use another --stage-dir"
            ) from None
    return root


def _check_path(path: Path, links: int = 0) -> None:
    """Refuse a path on which another user could replace a directory."""
    for part in (*reversed(path.parents), path):
        if problem := who_may_rename(part):
            raise TorchrelayError(f"{problem}: use another --stage-dir")
        if part.is_symlink():
            if links > _MOST_LINKS:
                raise TorchrelayError(f"{path} has more than {_MOST_LINKS} symbolic links: use another --stage-dir")
            _check_path(Path(os.path.normpath(part.parent / part.readlink())), links + 1)


def open_lock(path: Path) -> int:
    """Open a lock file, without taking the lock, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock, alone or shared, unless another process holds it. The kernel releases a killed process's."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class NodeDir:
    """The files of one run on one node, by name."""

    path: Path

    snapshots = Below("snapshots")
    """The newest snapshots, each a directory like a checkpoint's."""
    exits = Below("exits")
    """One file for each rank that failed."""
    lock = Below("lock")
    """Held by the run's agent on this node; if nobody holds it, the directory is abandoned."""

    def heartbeat(self, local_rank: int) -> Path:
        """The newest progress of one rank, for the node agent."""
        return self.path / "heartbeats" / f"local-{local_rank}"

    def make(self) -> None:
        """Make the directories that are missing: systemd empties /dev/shm at the user's logout (RemoveIPC=yes)."""
        for directory in (self.path, self.snapshots, self.exits, self.heartbeat(0).parent):
            directory.mkdir(mode=0o700, exist_ok=True)


def open_node_dir(run: Path, node_rank: int) -> tuple[NodeDir, int]:
    """Make and lock the directory of a run on this node, or take over the one of its previous attempt.

    Returns it with the descriptor that holds its lock until it is closed. Abandoned directories of this user's other
    runs are removed to free their memory. `node_rank` distinguishes the pretended nodes of one machine.

    Raises:
        TorchrelayError: the directory is not ours alone, or another agent of this run is on this node.
    """
    root = _root()
    own = NodeDir(root / f"{_key(run)}-{node_rank}")
    _remove_abandoned(root, own)
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while (descriptor := _make_and_lock(own)) is None:
        if time.monotonic() > deadline:
            raise TorchrelayError(f"{own.path} is in use: another agent of this run is on this node")
        time.sleep(_POLL_SECONDS)
    return own, descriptor


def _make_and_lock(own: NodeDir) -> int | None:
    """Make the directory and take its lock; None if another agent holds it, or has just removed the directory."""
    try:
        own.make()
        descriptor = open_lock(own.lock)
    except FileNotFoundError:
        return None
    if try_lock(descriptor) and own.lock.exists() and own.lock.stat().st_ino == os.fstat(descriptor).st_ino:
        return descriptor
    os.close(descriptor)
    return None


def _root() -> Path:
    return private_directory(DEV_SHM if os.access(DEV_SHM, os.W_OK) else _TMP)


def _key(run: Path) -> str:
    """Identifies a run, not only its path: a deleted run directory may have been replaced by another run's."""
    digest = hashlib.sha256(os.fsencode(run))
    spec = RunDir(run).spec
    if spec.exists():
        digest.update(spec.read_bytes() + str(spec.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def node_dirs(run: Path) -> list[NodeDir]:
    """A run's directories on this machine: one, or one for each pretended node."""
    return [NodeDir(path) for path in sorted(_root().glob(f"{_key(run)}-*"))]


def _remove_abandoned(root: Path, own: NodeDir) -> None:
    for found in root.iterdir():
        other = NodeDir(found)
        # Staged data, which share the directory if there is no /dev/shm, have no such lock.
        if found.name.startswith(own.path.name.rpartition("-")[0]) or not other.lock.exists():
            continue
        try:
            descriptor = open_lock(other.lock)
        except FileNotFoundError:
            continue  # another agent has just removed it
        if try_lock(descriptor):
            shutil.rmtree(found, ignore_errors=True)
        os.close(descriptor)
