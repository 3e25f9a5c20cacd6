"""What one run keeps in one node's memory while it runs there: every file name, once. Runs on compute nodes.

The directory lies in /dev/shm, so it outlives the processes that write into it and dies with the node. The node's
agent makes it, holds its lock, and removes it; the ranks write into it.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import TorchrelayError
from hpc.private import open_lock, private_directory, try_lock

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
    root = private_directory(MEMORY if os.access(MEMORY, os.W_OK) else DISK)
    own = NodeDir(root / f"{hashlib.sha256(os.fsencode(run)).hexdigest()[:16]}-{node_rank}")
    _remove_abandoned(root, own)
    for directory in (own.path, own.snapshots, own.exits, own.heartbeat(0).parent):
        directory.mkdir(mode=0o700, exist_ok=True)
    descriptor = open_lock(own.lock)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise TorchrelayError(f"{own.path} is in use: another agent of this run is on this node")
    return own, descriptor


def _remove_abandoned(root: Path, own: NodeDir) -> None:
    for found in root.iterdir():
        other = NodeDir(found)
        # The data that lie in /tmp, should there be no /dev/shm, have no such lock.
        if other == own or not other.lock.exists():
            continue
        descriptor = open_lock(other.lock)
        if try_lock(descriptor):
            shutil.rmtree(found, ignore_errors=True)
        os.close(descriptor)


def remove_node_dir(own: NodeDir, descriptor: int) -> None:
    """Remove the directory, and let go of its lock."""
    shutil.rmtree(own.path, ignore_errors=True)
    os.close(descriptor)
