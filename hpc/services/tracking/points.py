"""Reads the numbers in `metrics/*.jsonl`, of the classifier or a script, by the names that trackers show."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.base.files import read_json_lines

BOOKKEEPING = frozenset(
    {"step", "epoch", "attempt", "time", "train_seconds", "seconds", "correct", "total", "corrupt"}
)  # fmt: skip
"""Fields that get no curve, because they identify a line, or only complete other numbers."""
_EVALUATIONS = "eval"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics in one line of a file."""

    series: str
    """`train`, the split of an evaluation, or the name of another file."""
    step: int
    time: float | None
    """Seconds since the epoch; None if the line has no time."""
    values: Mapping[str, float]
    """The values by name, such as `train/loss`."""


def read_points(metrics: Path, sent: Mapping[str, int]) -> list[Point]:
    """Return the points that are still to be sent, sorted by step.

    `metrics` is the directory of the files, and `sent` has the last step that was sent of each series. If a restart
    repeated a step, its later line replaces the earlier one.
    """
    found = dict[tuple[int, str], Point]()
    for path in sorted(metrics.glob("*.jsonl")):
        for record in read_json_lines(path):
            point = _point(path.stem, record)
            if point is not None and point.step > sent.get(point.series, -1):
                found[point.step, point.series] = point
    return [found[key] for key in sorted(found)]


def _point(name: str, record: Mapping[str, Any]) -> Point | None:
    """Return the point of a line; None if a script has written a line without a whole number as `step`."""
    step, time, split = record.get("step"), record.get("time"), record.get("split")
    if type(step) is not int:
        return None
    series = split if name == _EVALUATIONS and isinstance(split, str) else name
    values = {
        f"{series}/{key}": float(value)
        for key, value in record.items()
        if key not in BOOKKEEPING and type(value) in {int, float}
    }
    if type(epoch := record.get("epoch")) in {int, float}:
        values["epoch"] = float(epoch)  # type: ignore[arg-type]  # a number
    return Point(series=series, step=step, time=time if type(time) in {int, float} else None, values=values)
