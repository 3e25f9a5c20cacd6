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


def send_to_step(number: int, root: int) -> None:
    """Send a signal to a process and, before it, to all its descendants."""
    for pid in (*processes_below(root), root):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # A rank's os.kill would not do what Slurm does (jobs.ranks.helper_processes).
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
