"""What one run keeps in one node's memory while it runs there: every file name, once. Runs on compute nodes.

The directory lies in /dev/shm, so it outlives the processes that write into it and dies with the node. The node's
agent makes it, holds its lock, and removes it; the ranks write into it.
"""

import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.rundir import RunDir

_MOST_LINKS = 10
# An agent of the last attempt may still be on its way out.
_PATIENCE_SECONDS, _POLL_SECONDS = 30.0, 0.2
MEMORY, DISK = Path("/dev/shm"), Path("/tmp")  # noqa: S108 - the directories below them are private


@dataclass(frozen=True)
class NodeDir:
    """The files of one run on one node, by name."""

    path: Path

    @property
    def snapshots(self) -> Path:
        """The newest states of the training, each in a directory as a checkpoint's."""
        return self.path / "snapshots"

    @property
    def exits(self) -> Path:
        """One file for each rank that ended badly."""
        return self.path / "exits"

    def heartbeat(self, local_rank: int) -> Path:
        """What one rank did last; read by the agent, from outside."""
        return self.path / "heartbeats" / f"local-{local_rank}"

    def make(self) -> None:
        """Make what there is not: systemd empties /dev/shm when its user logs out of the node (RemoveIPC=yes)."""
        for directory in (self.path, self.snapshots, self.exits, self.heartbeat(0).parent):
            directory.mkdir(mode=0o700, exist_ok=True)

    @property
    def lock(self) -> Path:
        """Held by the run's agent on this node: a directory whose lock is free is nobody's."""
        return self.path / "lock"


def open_node_dir(run: Path, node_rank: int) -> tuple[NodeDir, int]:
    """Make the directory of a run on this node, or take over what its last attempt left, and hold its lock.

    What other runs of this user left behind, whose agents are gone, is removed: it is memory that nobody uses.

    Args:
        run: the run directory.
        node_rank: tells the pretended nodes of one machine apart.

    Returns:
        The directory, and the descriptor that holds its lock until it is closed.

    Raises:
        TorchrelayError: the directory is not ours alone, or another agent of this run is on this node.
    """
    root = _root()
    own = NodeDir(root / f"{_key(run)}-{node_rank}")
    _remove_abandoned(root, own)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (descriptor := _make_and_lock(own)) is None:
        if time.monotonic() > deadline:
            raise TorchrelayError(f"{own.path} is in use: another agent of this run is on this node")
        time.sleep(_POLL_SECONDS)
    return own, descriptor


def _make_and_lock(own: NodeDir) -> int | None:
    """Make the directory and take its lock; None if another agent has it, or has just removed the directory."""
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
    return private_directory(MEMORY if os.access(MEMORY, os.W_OK) else DISK)


def _key(run: Path) -> str:
    """Another run of the same name, after the first one's directory was deleted, is another run."""
    digest = hashlib.sha256(os.fsencode(run))
    spec = RunDir(run).spec
    if spec.exists():
        digest.update(spec.read_bytes() + str(spec.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def node_dirs(run: Path) -> list[NodeDir]:
    """What there is of a run on this machine: one directory, or one for each pretended node."""
    return [NodeDir(path) for path in sorted(_root().glob(f"{_key(run)}-*"))]


def _remove_abandoned(root: Path, own: NodeDir) -> None:
    for found in root.iterdir():
        other = NodeDir(found)
        # The data that lie in /tmp, should there be no /dev/shm, have no such lock.
        if found.name.startswith(own.path.name.rpartition("-")[0]) or not other.lock.exists():
            continue
        try:
            descriptor = open_lock(other.lock)
        except FileNotFoundError:
            continue  # another agent was quicker
        if try_lock(descriptor):
            shutil.rmtree(found, ignore_errors=True)
        os.close(descriptor)


def private_directory(place: Path) -> Path:
    """Our own directory `torchrelay-<uid>` in a place that everybody can write to.

    Raises:
        TorchrelayError: something is there that others could have put there, or can write to.
    """
    _check_path(place.absolute())
    root = place / f"torchrelay-{os.getuid()}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise TorchrelayError(
                f"{root} belongs to {user_name(status.st_uid)} and is {stat.filemode(status.st_mode)}, not a directory "
                "that only you can use, so someone else may have put it there: remove it, or use another --stage-dir"
            ) from None
    return root


def _check_path(path: Path, links: int = 0) -> None:
    """Refuse a way on which somebody else could put another directory in the place of ours.

    Who owns `/` administers the machine; inside a user namespace that need not be user 0.
    """
    trusted = {0, os.getuid(), Path("/").stat().st_uid}
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if status.st_uid not in trusted:
            raise TorchrelayError(
                f"{part} on the way to {path} belongs to {user_name(status.st_uid)}, who could put anything there: "
                "use another --stage-dir"
            )
        if stat.S_ISLNK(status.st_mode):
            if links > _MOST_LINKS:
                raise TorchrelayError(f"{path} is a link that leads to links without end: use another --stage-dir")
            _check_path(Path(os.path.normpath(part.parent / part.readlink())), links + 1)
        elif _others_may_rename(status):
            raise TorchrelayError(
                f"{part} is {stat.filemode(status.st_mode)}: others may rename what is in it, so it is no place for "
                "data that nobody else is to change: use another --stage-dir, or have its sticky bit set (chmod +t)"
            )


def _others_may_rename(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:
        return False
    # A group of the user's own name and number is nobody else.
    own_group = status.st_gid == os.getgid() == os.getuid()
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not own_group))


def user_name(uid: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def open_lock(path: Path) -> int:
    """Open a lock file, which nobody holds by that, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock, unless another process holds it. The kernel releases the lock of one that is killed.

    Args:
        descriptor: of the open lock file.
        shared: with others who share it; by default alone.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
