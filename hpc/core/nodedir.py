"""What one run keeps in one node's memory while it runs there: every file name, once. Runs on compute nodes.

The directory lies in /dev/shm, so it outlives the processes that write into it and dies with the node. The node's
agent makes it, holds its lock, and removes it; the ranks write into it.
"""

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.rundir import RunDir
from hpc.core.secure_dirs import open_lock, private_directory, try_lock

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
