"""What is on the testbed's nodes: processes, and files in memory and in /tmp. Runs as root on its machine."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc.testbed import lifecycle, nodes

_SLURM = ("slurmd", "slurmstepd")


def processes(name: str) -> list[int]:
    """Those on a node, without Slurm's own."""
    return [pid for pid in nodes.processes(lifecycle.PATHS.node_net(name)) if _command(pid) not in (*_SLURM, "")]


def memory_of(name: str) -> Path:
    """A node's /dev/shm."""
    return _root(name) / "dev" / "shm"


def files(names: Iterable[str]) -> str:
    """The files in the nodes' /tmp and /dev/shm, in words; empty if there are none."""
    found = []
    for place in ("tmp", "dev/shm"):
        paths = [path for name in names for path in (_root(name) / place).rglob("*")]
        sizes = [path.stat().st_size for path in paths if path.is_file() and not path.is_symlink()]
        if sizes:
            found.append(f"{len(sizes)} file{'s' if len(sizes) > 1 else ''} ({sum(sizes) / 1e6:.1f} MB) in /{place}")
    return ", ".join(found)


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _root(name: str) -> Path:
    """The node's file system, as its slurmd sees it; of a dead node a path that does not exist."""
    pids = nodes.processes(lifecycle.PATHS.node_net(name))
    return next((Path(f"/proc/{pid}/root") for pid in pids if _command(pid) == "slurmd"), Path("/nonexistent"))


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
