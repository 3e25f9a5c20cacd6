"""What the Linux kernel reports: processes, and the memory that is left. Runs everywhere; stdlib only."""

import resource
from collections.abc import Iterator
from pathlib import Path

# Of the words that follow the name in /proc/PID/stat: proc(5) counts them from 3.
_STATE, _START_TIME = 3 - 3, 22 - 3
# Memory of the node that is left to everybody else: a part of all.
_RESERVE = 0.05
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# The files of a limit and of what counts against it, in the two versions of control groups.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def _stat(pid: str | int) -> list[str]:
    """The words after the name, which stands in parentheses and may hold anything; none if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_time(pid: str | int) -> int | None:
    """When a process began, in the kernel's clock ticks: with it a process id names one process for good."""
    words = _stat(pid)
    return int(words[_START_TIME]) if words else None


def process_state(pid: str | int) -> str | None:
    """The kernel's letter for what a process does (R, S, D, T, Z); None if there is none."""
    words = _stat(pid)
    return words[_STATE] if words else None


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there; none if it has ended itself."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
    return found


def is_alive(pid: str | int, started: int | None) -> bool:
    """Whether this very process runs. A zombie, which only waits to be looked at by its parent, does not."""
    words = _stat(pid)
    return bool(words) and words[_STATE] != "Z" and int(words[_START_TIME]) == started


def available_memory_bytes() -> int:
    """Bytes that this process may still use: what the node has, and what its control groups allow."""
    node = _numbers(Path("/proc/meminfo"))
    spare = (node["MemAvailable:"] - int(node["MemTotal:"] * _RESERVE)) * 1024
    return min([spare, *cgroup_available_bytes(Path("/proc/self/cgroup").read_text(), _CONTROL_GROUPS)])


def resident_memory_bytes() -> int:
    """Bytes that this process has in memory, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cgroup_available_bytes(membership: str, root: Path) -> Iterator[int]:
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
