"""What the step log of a training says about a failure: when it trained again, and what it had lost. Pure.

`rivals/common.py` writes the log, in the same way for every contender.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Entry = dict[str, Any]
_TYPICAL_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a training came back from a failure."""

    seconds: float
    """The time from the failure to the first step of ranks that were started after it."""
    steps_lost: int
    """Steps that rank 0 had made before, and that the restored state does not have."""


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
    first = next((entry for entry in steps if entry["time"] > failed_at and entry["pid"] in pids), None)
    if first is None:
        return None
    start = next(entry for entry in reversed(starts) if entry["pid"] == first["pid"] and entry["time"] < first["time"])
    # Steps that were still made after the failure count too: a preempted job may train on for its grace time.
    before = [entry["step"] for entry in steps if entry["time"] < start["time"]]
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
