"""Which processes there are, and what they use: for the benchmarks that watch a training from outside."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc.base.kernel import children

# Positions after the process name in /proc/PID/stat; proc(5) counts these fields from 3.
_USER_TIME, _SYSTEM_TIME = 14 - 3, 15 - 3


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    own = children(pid)
    return [*own, *(each for child in own for each in descendants(child))]


def naming(directory: Path) -> dict[int, list[str]]:
    """Return the command lines of processes whose arguments or environment name a directory, by process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with suppress(OSError):
            line = (path / "cmdline").read_bytes().decode(errors="replace")
            if str(directory) in line or os.fsencode(directory) in (path / "environ").read_bytes():
                found[int(path.name)] = line.split("\0")
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, without its children's; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pids: Iterable[int], *kinds: str) -> int:
    """Return the memory of some processes: of pages that several processes have, each has its share (PSS).

    Args:
        pids: the processes, which may have ended.
        kinds: fields of smaps_rollup, such as Pss, or Pss_Anon for what no file holds.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
            total += sum(int(words[1]) * 1024 for words in fields if words[0].rstrip(":") in kinds)
    return total
