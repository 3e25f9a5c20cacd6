"""What is on the testbed's nodes. Runs as root on its machine."""

from contextlib import suppress
from pathlib import Path

from hpc.testbed import lifecycle, nodes


def memory_of(name: str) -> Path:
    """Return a node's /dev/shm, as its slurmd sees it; of a dead node a path that does not exist."""
    for pid in nodes.processes(lifecycle.PATHS.node_net(name)):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                return Path(f"/proc/{pid}/root/dev/shm")
    return Path("/nonexistent")


def is_alive(pid: int) -> bool:
    """Return whether a process is there, and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
