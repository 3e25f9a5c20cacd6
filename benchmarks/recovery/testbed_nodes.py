"""What is on the testbed's nodes: processes, and files in memory and in /tmp. Runs as root on its machine."""

from collections.abc import Collection
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


def files(names: Collection[str]) -> str:
    """The files in the nodes' /tmp and /dev/shm, in words; empty if there are none."""
    sizes: dict[str, list[int]] = {}
    for place in ("tmp", "dev/shm"):
        for root in map(_root, names):
            for path in (root / place).rglob("*"):
                if path.is_file() and not path.is_symlink():
                    # Our copies of data sets stay on purpose: the next run on the node uses them again.
                    is_data = place == "tmp" and path.relative_to(root / place).parts[0].startswith("torchrelay-")
                    what = "of staged data" if is_data else f"in /{place}"
                    sizes.setdefault(what, []).append(path.stat().st_size)
    return ", ".join(
        f"{len(each)} file{'s' if len(each) > 1 else ''} {what} ({sum(each) / 1e6:.1f} MB)"
        for what, each in sizes.items()
    )


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
