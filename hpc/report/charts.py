"""Chooses what the figures show: one figure for each metric in `metrics/*.jsonl`. Pure; runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from hpc.report.colors import line_style
from hpc.report.gather import RunRecord, labels_of
from hpc.services.tracking.points import BOOKKEEPING

SMOOTHINGS = {"none": 0, "light": 100, "medium": 40, "strong": 10}
"""Divisor for each degree of smoothing: `medium` averages over 1/40 of a line's points; 0 means no smoothing."""
MOST_POINTS = 1000
"""The largest number of points of one line. On the page, each point takes up to seven numbers of four bytes."""
# A loss that falls by this factor gets a logarithmic scale: on a linear scale, its end would look flat.
_LONG_FALL = 4.0
# Lines with at most this number of points have no trend.
_PLAIN_POINTS = 60
_EVALUATIONS = frozenset({"validation", "test"})
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How figures show a metric."""

    title: str
    form: str = "%.5g"
    """A printf format for a value."""
    scale: float = 1.0
    """Factor by which to multiply a value before it is shown."""
    noisy: bool = True
    """Whether to draw a smoothed trend, because the values vary much from step to step."""
    from_zero: bool = False
    prefers_validation: bool = False
    """Whether a comparison, which has one line per run, prefers validation values to training values."""


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
    """A quantity that the x axis can show."""

    name: str
    label: str
    limits: tuple[float, float]
    is_logarithmic: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Labels of the ticks, by value. If empty, Bokeh chooses the ticks."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a figure. Its points have columns such as `step` and `value`; a noisy line also has smoothed values."""

    name: str
    color: str
    dashes: str
    """Dash pattern, as `line_style` returns it."""
    points: pd.DataFrame
    has_dots: bool = False
    """Whether each point gets a dot. Evaluations get dots, because they are few."""
    has_line: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure, with a metric on the y axis."""

    column: str
    look: Look
    series: Sequence[Series]
    x: str = "step"
    """Name of the quantity on the x axis, which is in the column `step`."""
    heading: str = ""
    """Heading of the figure. If empty, the title of the metric is the heading."""

    @property
    def is_logarithmic(self) -> bool:
        """Whether the y axis is logarithmic: on a linear one, the end of a loss that falls far would look flat."""
        values = pd.concat([series.points["value"] for series in self.series])
        return self.column == "loss" and bool(values.min() > 0) and bool(values.max() > _LONG_FALL * values.min())

    @property
    def description(self) -> str:
        """A description in words, for people who cannot see the figure."""
        words = [f"{self.look.title} by {self.x}."]
        for one in self.series:
            values, steps = one.points["value"], one.points["step"]
            first, last = (f"{self.look.form % values.iloc[i]} at {self.x} {steps.iloc[i]:.6g}" for i in (0, -1))
            course = f"from {first} to {last}, " if one.has_line else ""
            lowest, highest = self.look.form % values.min(), self.look.form % values.max()
            words.append(f"{one.name}: {course}lowest {lowest}, highest {highest}.")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Converts times to times since the start of a run's first attempt, in one unit for all runs on a page."""

    unit: str
    unit_seconds: float

    def since(self, began: float | None, time: pd.Series) -> pd.Series:
        """Convert times in seconds since the epoch to times since `began`. If `began` is None, return NaN."""
        return (time - (np.nan if began is None else began)) / self.unit_seconds


def clock_for(records: Sequence[RunRecord], now: float) -> Clock:
    """Return a clock in the largest unit that fits at least twice into the longest run, or else in seconds."""
    longest = max((one.ended(now) - one.began for one in records if one.began is not None), default=0.0)
    seconds, unit = next((each for each in _UNITS if longest >= 2 * each[0]), _UNITS[-1])
    return Clock(unit=unit, unit_seconds=seconds)


def charts_of(records: Sequence[RunRecord], clock: Clock) -> list[Chart]:
    """Return the figures of one run or of several. Metrics that are in LOOKS come first."""
    tables = [_tables(record, records) for record in records]
    columns = [column for named in tables for table in named.values() for column in table if _is_plotted(column, table)]
    found = list[Chart]()
    for column in dict.fromkeys([*(name for name in LOOKS if name in columns), *columns]):
        look = LOOKS.get(column, Look(title=column))
        points = [_points(record, named, column, look, clock) for record, named in zip(records, tables, strict=True)]
        if len(records) > 1:
            labelled = zip(labels_of(records), (_compared(each, look) for each in points), strict=True)
            lines = [(number, label, *chosen) for number, (label, chosen) in enumerate(labelled) if chosen]
        else:
            # A line's number, and so its color, depends on its name alone: it has the same color in all figures.
            names = list(tables[0])
            lines = [(names.index(name), name, name, table) for name, table in points[0].items()]
        series = [
            Series(name=label, color=color, dashes=dashes, has_dots=name in _EVALUATIONS, points=table)
            for number, label, name, table in lines
            for color, dashes in [line_style(number)]
        ]
        found += [Chart(column=column, look=look, series=series)] if series else []
    return found


def _tables(record: RunRecord, shown: Sequence[RunRecord]) -> dict[str, pd.DataFrame]:
    """Return the metrics of each line, by the line's name. Leave out the steps that a fork copied from a shown run."""
    train, evaluations = record.train, record.evaluations
    if any(record.is_fork_of(other) for other in shown):
        train, evaluations = (table[table["attempt"] != 0] for table in (train, evaluations))
    # A user's script may leave out the split of an evaluation, which then counts as a validation.
    splits = evaluations["split"].fillna("val")
    names = {"val": "validation", "test": "test", **{split: split for split in splits.unique() if split != "val"}}
    evaluated = {name: evaluations[splits == split] for split, name in names.items()}
    return {"training": train, **evaluated, **record.other_metrics}


def _is_plotted(column: str, table: pd.DataFrame) -> bool:
    if column in BOOKKEEPING or not pd.api.types.is_numeric_dtype(table[column]):
        return False
    # The number of ranks is worth a figure only if it changes, as in an elastic run that has lost nodes.
    return column != "world_size" or table[column].min() < table[column].max()


def _points(
    record: RunRecord, tables: Mapping[str, pd.DataFrame], column: str, look: Look, clock: Clock
) -> dict[str, pd.DataFrame]:
    """Return the points of a metric for each line that has values, by the name of the line."""
    found = dict[str, pd.DataFrame]()
    for name, table in tables.items():
        if column not in table:
            continue
        values = table[column].astype("float64") * look.scale
        values = values[np.isfinite(values)]
        if values.empty:
            continue
        # Points are selected before the other columns are computed: a long run has millions of points.
        drawn = extremes(values, MOST_POINTS)
        rows, by_epoch, trends = table.loc[drawn], record.steps_per_epoch, _trends(look, name, values)
        found[name] = pd.DataFrame(
            {
                "step": rows["step"],
                "time": clock.since(record.began, rows["time"]),
                "epoch": rows["step"] / by_epoch if by_epoch else rows["epoch"],
                "value": values[drawn],
                **{f"value_{degree}": smoothed(values, part)[drawn] for degree, part in trends.items()},
            }
        ).reset_index(drop=True)
    return found


def _trends(look: Look, name: str, values: pd.Series) -> Mapping[str, int]:
    is_plain = not look.noisy or name in _EVALUATIONS or len(values) <= _PLAIN_POINTS
    return {} if is_plain else {degree: part for degree, part in SMOOTHINGS.items() if part}


def smoothed(values: pd.Series, part: int) -> pd.Series:
    """Return the moving average over 1/part of a line's values. It is centered, so it neither lags nor leads."""
    return values.rolling(len(values) // part + 1, center=True, min_periods=1).mean()


def extremes(values: pd.Series, most: int) -> pd.Index:
    """Return the index labels of at most `most` values: the lowest and the highest of each stretch of the line."""
    if len(values) <= most:
        return values.index
    stretches = np.arange(len(values)) * (most // 2 - 1) // len(values)
    grouped = values.groupby(stretches)
    return pd.Index(sorted({values.index[0], values.index[-1], *grouped.idxmin(), *grouped.idxmax()}))


def _compared(points: Mapping[str, pd.DataFrame], look: Look) -> tuple[str, pd.DataFrame] | None:
    """Return the name and the points of the line that shows a run in a comparison; None if the run has no points."""
    preferred = [name for name in ("validation", "test") if look.prefers_validation and name in points]
    return next(((name, points[name]) for name in (*preferred, *points)), None)


def axes_of(charts: Sequence[Chart], clock: Clock) -> list[Axis]:
    """Return the x axes among step, time and epoch for which every point has a value."""
    labels = {"step": "step", "time": f"{clock.unit} since the start", "epoch": "epoch"}
    tables = [series.points for chart in charts for series in chart.series]
    known = [name for name in labels if tables and all(table[name].notna().all() for table in tables)]
    largest = {name: max(1e-6, *(float(table[name].max()) for table in tables)) for name in known}
    return [Axis(name=name, label=labels[name], limits=(-0.02 * end, 1.02 * end)) for name, end in largest.items()]
