"""What the figures show: one for each number in `metrics/*.jsonl`, whoever wrote it. Pure; runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hpc.report.gather import RunRecord, labels_of
from hpc.tracking.points import BOOKKEEPING

SERIES = 8
"""Colors of lines; then they repeat with other dashes."""
DASHES = ("solid", "dashed", "dotted")
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a number is shown."""

    title: str
    form: str = "%.5g"
    """A value as printf writes it."""
    scale: float = 1.0
    """By which it is multiplied."""
    noisy: bool = True
    """Whether a trend says more than the values."""
    from_zero: bool = False
    prefers_validation: bool = False
    """In a comparison, which has one line for each run; otherwise the training's is shown."""


LOOKS = {
    "loss": Look(title="Loss", form="%.4f"),
    "accuracy": Look(title="Accuracy (%)", form="%.2f", scale=100, prefers_validation=True),
    "top5_accuracy": Look(title="Top-5 accuracy (%)", form="%.2f", scale=100, prefers_validation=True),
    "images_per_second": Look(title="Images per second", form="%.0f", from_zero=True),
    "lr": Look(title="Learning rate", form="%.3g", from_zero=True, noisy=False),
    "data_wait_share": Look(title="Waiting for data (%)", form="%.1f", scale=100, from_zero=True),
    "allreduce_wait_share": Look(title="Waiting for the all-reduce (%)", form="%.1f", scale=100, from_zero=True),
    "allreduce_seconds": Look(title="All-reduce of the gradients (s)", form="%.4f", from_zero=True),
    "memory_bytes": Look(title="Memory of rank 0 (GiB)", form="%.2f", scale=2**-30, from_zero=True, noisy=False),
    "world_size": Look(title="Ranks", form="%d", from_zero=True, noisy=False),
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the x axis can show."""

    name: str
    label: str
    largest: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: a table of step, time, epoch and value."""

    name: str
    color: str
    dashes: str
    """One of `DASHES`."""
    is_evaluation: bool
    points: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: a number over the steps."""

    column: str
    look: Look
    series: Sequence[Series]

    @property
    def description(self) -> str:
        """It in words, for those who cannot see it."""
        words = [f"{self.look.title} by step."]
        for one in self.series:
            values, steps = one.points["value"], one.points["step"]
            first, last = (f"{self.look.form % values.iloc[i]} at step {steps.iloc[i]:.0f}" for i in (0, -1))
            lowest, highest = self.look.form % values.min(), self.look.form % values.max()
            words.append(f"{one.name}: from {first} to {last}, lowest {lowest}, highest {highest}.")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times since the start of a run's first attempt, in a unit that suits all runs on a page."""

    unit: str
    unit_seconds: float

    def since(self, began: float | None, time: pd.Series) -> pd.Series:
        """Times in seconds since the epoch, by this clock."""
        return (time - (np.nan if began is None else began)) / self.unit_seconds


def clock_for(records: Sequence[RunRecord], now: float) -> Clock:
    """A clock in the largest unit of which the longest run took two."""
    longest = max((one.ended(now) - one.began for one in records if one.began is not None), default=0.0)
    seconds, unit = next((each for each in _UNITS if longest >= 2 * each[0]), _UNITS[-1])
    return Clock(unit=unit, unit_seconds=seconds)


def line_style(number: int) -> tuple[str, str]:
    """The color and the dashes of a line, by its number: every pair is used before one repeats."""
    return f"s{number % SERIES + 1}", DASHES[number // SERIES % len(DASHES)]


def charts_of(records: Sequence[RunRecord], clock: Clock) -> list[Chart]:
    """The figures of one run, or of several: those of our trainer first."""
    tables = [_tables(record) for record in records]
    columns = [column for named in tables for table in named.values() for column in table if _is_plotted(column, table)]
    found = list[Chart]()
    for column in dict.fromkeys([*(name for name in LOOKS if name in columns), *columns]):
        look = LOOKS.get(column, Look(title=column))
        points = [_points(record, named, column, look, clock) for record, named in zip(records, tables, strict=True)]
        if len(records) > 1:
            labelled = zip(labels_of(records), (_compared(each, look) for each in points), strict=True)
            lines = [(number, label, *chosen) for number, (label, chosen) in enumerate(labelled) if chosen]
        else:
            # A line has the same color in all figures.
            names = list(tables[0])
            lines = [(names.index(name), name, name, table) for name, table in points[0].items()]
        series = [
            Series(name=label, color=color, dashes=dashes, is_evaluation=name in {"validation", "test"}, points=table)
            for number, label, name, table in lines
            for color, dashes in [line_style(number)]
        ]
        found += [Chart(column=column, look=look, series=series)] if series else []
    return found


def _tables(record: RunRecord) -> dict[str, pd.DataFrame]:
    """All metrics of a run, by the name of a line."""
    evaluations = record.evaluations
    # An own script may name none.
    splits = evaluations["split"].fillna("val")
    names = {"val": "validation", "test": "test", **{split: split for split in splits.unique() if split != "val"}}
    evaluated = {name: evaluations[splits == split] for split, name in names.items()}
    return {"training": record.train, **evaluated, **record.other_metrics}


def _is_plotted(column: str, table: pd.DataFrame) -> bool:
    if column in BOOKKEEPING or not pd.api.types.is_numeric_dtype(table[column]):
        return False
    # Of an elastic run that has lost nodes.
    return column != "world_size" or table[column].min() < table[column].max()


def _points(
    record: RunRecord, tables: Mapping[str, pd.DataFrame], column: str, look: Look, clock: Clock
) -> dict[str, pd.DataFrame]:
    """The points of each line that has some."""
    found = dict[str, pd.DataFrame]()
    for name, table in tables.items():
        if column not in table:
            continue
        by_epoch = record.steps_per_epoch
        points = pd.DataFrame(
            {
                "step": table["step"],
                "time": clock.since(record.began, table["time"]),
                "epoch": table["step"] / by_epoch if by_epoch else table["epoch"],
                "value": table[column].astype("float64") * look.scale,
            }
        )
        points = points[np.isfinite(points["value"])].sort_values("step").reset_index(drop=True)
        if not points.empty:
            found[name] = points
    return found


def _compared(points: Mapping[str, pd.DataFrame], look: Look) -> tuple[str, pd.DataFrame] | None:
    """The one line of a run in a comparison: its name, and its points."""
    preferred = [name for name in ("validation", "test") if look.prefers_validation and name in points]
    return next(((name, points[name]) for name in (*preferred, *points)), None)


def axes_of(charts: Sequence[Chart], clock: Clock) -> list[Axis]:
    """What the x axis can show: those of which every point is known."""
    labels = {"step": "step", "time": f"{clock.unit} since the start", "epoch": "epoch"}
    tables = [series.points for chart in charts for series in chart.series]
    return [
        Axis(name=name, label=label, largest=max(float(table[name].max()) for table in tables))
        for name, label in labels.items()
        if tables and all(table[name].notna().all() for table in tables)
    ]
