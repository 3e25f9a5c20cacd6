"""What the kernel says of a process of this machine: what squeue is to Slurm. Runs everywhere."""

from pathlib import Path

# Of the words that follow the name in /proc/PID/stat: proc(5) counts them from 3.
_STATE, _START_TIME = 3 - 3, 22 - 3


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


def state_of(pid: str | int) -> str | None:
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
