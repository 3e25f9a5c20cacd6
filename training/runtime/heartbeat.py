"""A rank's signs of life, in a file that the node's agent reads from outside. Runs on every rank; imports no torch."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

Phase = Literal["start", "load", "step", "evaluate", "save", "end"]

# The file never changes its size, so a reader finds one whole record; the rest of it is spaces.
_BYTES = 512


class Heartbeat:
    """One JSON object, rewritten in place: what the rank does at the moment, and how fast it is.

    A beat is one write of memory into memory. If it fails, there is one sign of life less, and the training goes on.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._step = 0
        self._descriptor = _open(path)
        self.step_seconds: float | None = None
        """Mean wall time of recent steps."""
        self.busy_seconds: float | None = None
        """Mean time of this rank's own work in recent steps."""

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Give a sign of life.

        Args:
            phase: what begins now.
            step: optimizer steps done; by default as many as the last time.
        """
        if self._descriptor is None:
            return
        self._count += 1
        self._step = self._step if step is None else step
        record = {
            "rank": self._rank,
            "pid": os.getpid(),
            "step": self._step,
            "phase": phase,
            "count": self._count,
            "time": time.time(),
            "step_seconds": self.step_seconds,
            "busy_seconds": self.busy_seconds,
        }
        with suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(record).encode().ljust(_BYTES), 0)


def _open(path: Path | None) -> int | None:
    """The file, new or an earlier process's; None if there is none, or it cannot be opened."""
    if path is None:
        return None
    with suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return None


SILENT = Heartbeat(None, 0)
