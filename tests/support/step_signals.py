"""Signals as Slurm sends them: to every process of a job step. Also for scripts in ranks: uses the standard library."""

import contextlib
import os
import signal
from pathlib import Path


def processes_below(pid: int) -> list[int]:
    """Return the descendants of a process, in whatever session, the youngest generation first."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text().split()):
                found += [*processes_below(child), child]
    return found


def send_to_step(number: int, pid: int | None = None) -> None:
    """Send a signal to a process, by default this one, and to all its descendants before it."""
    # The ranks' own os.kill must not change what Slurm would send.
    for each in (*processes_below(pid or os.getpid()), pid or os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(each)
            try:
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
