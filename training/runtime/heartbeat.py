"""A rank's heartbeat: a file that the node agent reads. Runs on every rank; imports no torch."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

_Item = TypeVar("_Item")
Phase = Literal["start", "load", "step", "evaluate", "save", "end"]

# The file keeps its size (padded with spaces), so a reader always finds one whole record.
_BYTES = 512


class Heartbeat:
    """One JSON object, rewritten in place: what the rank is doing, and how fast it is.

    A beat is one write into memory. If that fails, one beat is missing and the training continues.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._step = 0
        self._path = path
        self._descriptor: int | None = None
        self.step_seconds: float | None = None
        """Mean wall time of recent steps."""
        self.busy_seconds: float | None = None
        """Mean time of this rank's own work in recent steps."""

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Write what begins now and the optimizer steps done, by default as in the previous beat."""
        if self._path is None:
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
            os.pwrite(self._open(self._path), json.dumps(record).encode().ljust(_BYTES), 0)

    def beat_with_each(self, phase: Phase, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each with a beat before it."""
        for item in items:
            self.beat(phase)
            yield item

    def _open(self, path: Path) -> int:
        """The descriptor of the file, which is new, an earlier process's, or already open.

        Something may have emptied /dev/shm; the agent makes the directory again (hpc.core.nodedir).
        """
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor


NO_HEARTBEAT = Heartbeat(None, 0)
