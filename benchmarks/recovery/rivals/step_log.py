"""The step log of a training: how its ranks write it, and what it says about a failure.

All contenders of the benchmarks write it in the same way, in any environment: it needs the standard library alone.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Entry = dict[str, Any]
_TYPICAL_STEPS = 50
# Ranks that end sooner after their first step have not recovered: a tool may start them at once, and end them again.
_LASTING_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a training came back from a failure."""

    seconds: float
    """The time from the failure to the first step of ranks that were started after it and trained on."""
    steps_lost: int
    """Steps that rank 0 had made before, and that the restored state does not have."""


class StepLog:
    """Appends when a rank started, the first step of each rank, and all steps of rank 0.

    A line is one write of a few bytes at the end of a file on the same machine, which is not torn by another writer.
    """

    def __init__(self, path: Path, rank: int, step: int) -> None:
        """Log a start.

        Args:
            path: the file, which all ranks share.
            rank: the number of this rank.
            step: the step of the state with which it begins.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._rank, self._has_stepped = rank, False
        self._write(event="start", rank=rank, host=socket.gethostname(), step=step)

    def step(self, step: int) -> None:
        """Log that the optimizer has made a step; steps are counted from 1."""
        if not self._has_stepped:
            self._has_stepped = True
            self._write(event="first_step", rank=self._rank)
        if self._rank == 0:
            self._write(event="step", step=step)

    def end(self) -> None:
        """Log that the training is complete."""
        if self._rank == 0:
            self._write(event="end")

    def _write(self, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "pid": os.getpid(), **fields}) + "\n"
        os.write(self._file, line.encode())


def read(path: Path) -> list[Entry]:
    """Return the entries, oldest first; none if there is no file."""
    if not path.exists():
        return []
    # The last line may be in the making.
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def newest_step(log: Sequence[Entry]) -> int:
    """Return the last step that was made; 0 without one."""
    return next((entry["step"] for entry in reversed(log) if entry["event"] == "step"), 0)


def ranks(log: Sequence[Entry]) -> dict[int, Entry]:
    """Return the newest start of each rank."""
    return {entry["rank"]: entry for entry in log if entry["event"] == "start"}


def recovery(log: Sequence[Entry], failed_at: float) -> Recovery | None:
    """Return how it came back from the failure at that time (seconds since the epoch); None: it has not."""
    starts = [entry for entry in log if entry["event"] == "start" and entry["rank"] == 0 and entry["time"] > failed_at]
    pids = [entry["pid"] for entry in starts]
    steps = [entry for entry in log if entry["event"] == "step"]
    for start in starts:
        own = [entry for entry in steps if entry["pid"] == start["pid"] and entry["time"] > start["time"]]
        if own and own[-1]["time"] - own[0]["time"] >= _LASTING_SECONDS:
            break
    else:
        return None
    [first, *_] = own
    # Steps that were still made after the failure count too: a preempted job may train on for its grace time.
    before = [entry["step"] for entry in steps if entry["time"] < start["time"] and entry["pid"] not in pids]
    return Recovery(
        seconds=round(first["time"] - failed_at, 1),
        # An earlier start may have got further than the last one.
        steps_lost=max((before[-1] if before else 0) - start["step"], 0),
    )


def step_seconds(log: Sequence[Entry], before: float) -> float:
    """Return how long a step took before that time: the median of the last ones."""
    times = [entry["time"] for entry in log if entry["event"] == "step" and entry["time"] <= before]
    return median(later - earlier for earlier, later in pairwise(times[-_TYPICAL_STEPS:])) if len(times) > 1 else 0.0


def useful_steps(log: Sequence[Entry]) -> int:
    """Return the number of different steps: recomputed ones count once."""
    return len({entry["step"] for entry in log if entry["event"] == "step"})
