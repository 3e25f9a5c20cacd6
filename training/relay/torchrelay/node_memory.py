"""Tells how much memory of a node is left for snapshots and copied data. Runs on compute nodes; imports no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

# Share of a node's memory to leave to other processes.
_RESERVE = 0.05
# Files with the memory limit and usage of a control group, in cgroup v2 and v1.
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_memory_bytes() -> int:
    """Return the bytes that this process may still use within the node's memory and the limits of its control groups.

    Files in /dev/shm count as used memory, also within the limit that Slurm may have set for the job.
    """
    node = _read_numbers(Path("/proc/meminfo"))
    available = (node["MemAvailable:"] - int(node["MemTotal:"] * _RESERVE)) * 1024
    return min([available, *cgroup_available_bytes(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))])


def lacking_space(directory: Path, size_bytes: int) -> str:
    """Return why a node's memory cannot take this much more in a directory; an empty text if it can.

    Raises OSError if the directory cannot be read.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < size_bytes:
        return f"{directory} has {_in_megabytes(free)} free, and snapshots need {_in_megabytes(size_bytes)} more"
    available = available_memory_bytes()
    if available < size_bytes:
        return f"{_in_megabytes(available)} of memory are available, and snapshots need {_in_megabytes(size_bytes)}"
    return ""


def _in_megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def cgroup_available_bytes(membership: str, root: Path) -> Iterator[int]:
    """Yield the bytes left in each control group with a memory limit. `membership` is the text of /proc/PID/cgroup."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            group = root / controllers / path.lstrip("/")
            yield from filter(None, map(_left_in_group, [group, *group.parents]))


def _left_in_group(group: Path) -> int | None:
    for limit_file, usage_file in _MEMORY_FILES:
        try:
            limit, used = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
            statistics = _read_numbers(group / "memory.stat")
        except (OSError, ValueError):
            continue
        # The kernel reclaims cached files first. Files on tmpfs, such as snapshots, do not count as cached.
        cached = sum(
            statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in ("inactive_file", "active_file")
        )
        return max(1, int(limit) - used + cached) if limit != "max" else None
    return None


def _read_numbers(path: Path) -> dict[str, int]:
    """Return the numbers in one of the kernel's files, by name."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
