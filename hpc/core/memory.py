"""How much memory there is to spare before the kernel kills somebody. Runs on every node; imports no torch.

What is written to /dev/shm counts as the job's memory, whose limit Slurm may have had a control group enforce.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

# Memory of the node that is left to everybody else: a part of all.
_RESERVE = 0.05
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# The files of a limit and of what counts against it, in the two versions of control groups.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def spare_memory() -> int:
    """Bytes that this process may still use: what the node has, and what its control groups allow."""
    node = _numbers(Path("/proc/meminfo"))
    spare = (node["MemAvailable:"] - int(node["MemTotal:"] * _RESERVE)) * 1024
    return min([spare, *allowed(Path("/proc/self/cgroup").read_text(), _CONTROL_GROUPS)])


def resident_memory() -> int:
    """Bytes that this process has in memory, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def allowed(membership: str, root: Path) -> Iterator[int]:
    """What each control group with a limit lets its processes still use, in bytes.

    Args:
        membership: the groups of a process, as /proc/PID/cgroup has them.
        root: where the groups are mounted.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            group = root / controllers / path.lstrip("/")
            yield from filter(None, map(_allowed_in, [group, *group.parents]))


def _allowed_in(group: Path) -> int | None:
    for limit, used in _FILES:
        try:
            most, now = (group / limit).read_text().strip(), int((group / used).read_text())
            statistics = _numbers(group / "memory.stat")
        except (OSError, ValueError):
            continue
        # The kernel drops cached files first; those in memory alone, such as snapshots, it does not count among them.
        cached = sum(
            statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in ("inactive_file", "active_file")
        )
        return max(1, int(most) - now + cached) if most != "max" else None
    return None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of the kernel's, by name."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
