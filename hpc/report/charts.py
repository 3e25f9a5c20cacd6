"""Chooses what the figures show: one figure for each metric in `metrics/*.jsonl`. Pure; runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hpc.report.gather import RunRecord, labels_of
from hpc.services.tracking.tracker import BOOKKEEPING

COLORS = {
    "s1": "#1d5fd1", "s2": "#c2500a", "s3": "#14804a", "s4": "#8a3ffc", "s5": "#b8256e", "s6": "#0b7285",
    "s7": "#7a5c00", "s8": "#55606e", "failure": "#c62828", "outside": "#b58100", "queue": "#7048a8",
}  # fmt: skip
"""The colors of lines and periods, by the names of their variables in the style sheet."""
_SERIES = 8
_DASHES = ("solid", "dashed", "dotted")
MOST_POINTS = 500
"""The largest number of points of one line, because the page has all figures in one file."""
TABLES_ONLY = BOOKKEEPING | {"top5_accuracy", "memory_bytes", "world_size"}
"""Numbers that only the tables have: they hardly change, or other figures show the same."""
# A trend averages over this part of a line's points. Shorter lines have no trend.
_TREND_PART, _PLAIN_POINTS = 40, 60
_EVALUATIONS = frozenset({"validation", "test"})


def line_style(number: int) -> tuple[str, str]:
    """Return the color and the dashes of a line by its number: no pair repeats before all are used."""
    return f"s{number % _SERIES + 1}", _DASHES[number // _SERIES % len(_DASHES)]


@dataclass(frozen=True, kw_only=True)
class Look:
    """How figures show a metric."""

    title: str
    scale: float = 1.0
    """Factor by which to multiply a value before it is shown."""
    noisy: bool = True
    """Whether to draw a smoothed trend, because the values vary much from step to step."""
    from_zero: bool = False
    falls: bool = False
    """Whether the scale is logarithmic if the values fall far: on a linear one, their end would look flat."""


LOOKS = {
    "loss": Look(title="Loss", falls=True),
    "accuracy": Look(title="Accuracy (%)", scale=100),
    "images_per_second": Look(title="Images per second", from_zero=True),
    "lr": Look(title="Learning rate", from_zero=True, noisy=False),
    "data_wait_share": Look(title="Waiting for data (%)", scale=100, from_zero=True),
}


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a figure. Its points have the columns `x` and `value`; a noisy line also has its `trend`."""

    name: str
    color: str
    dashes: str
    """Dash pattern, as `line_style` returns it."""
    points: pd.DataFrame
    has_dots: bool = False
    """Whether each point gets a dot. Evaluations get dots, because they are few."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure, with a metric on the y axis."""

    look: Look
    x: str
    """The quantity on the x axis, `step` or `epoch`."""
    series: Sequence[Series]

    @property
    def is_logarithmic(self) -> bool:
        """Whether the y axis is logarithmic, because the values fall to less than a quarter."""
        values = pd.concat([series.points["value"] for series in self.series])
        return self.look.falls and bool(0 < 4 * values.min() < values.max())

    @property
    def description(self) -> str:
        """A description in words, for people who cannot see the figure."""
        words = [f"{self.look.title} by {self.x}."]
        for one in self.series:
            values, places = one.points["value"], one.points["x"]
            first, last = (f"{values.iloc[i]:.5g} at {self.x} {places.iloc[i]:.6g}" for i in (0, -1))
            words.append(f"{one.name}: from {first} to {last}, lowest {values.min():.5g}, highest {values.max():.5g}.")
        return " ".join(words)


def charts_of(records: Sequence[RunRecord]) -> list[Chart]:
    """Return the figures of one run by step, or of several by epoch if all have epochs. Those in LOOKS come first."""
    by_epoch = len(records) > 1 and all(record.steps_per_epoch or not record.attempts for record in records)
    tables = [_tables(record, is_compared=len(records) > 1) for record in records]
    columns = dict.fromkeys(name for named in tables for table in named.values() for name in table)
    charts = list[Chart]()
    for column in dict.fromkeys([*(name for name in LOOKS if name in columns), *columns]):
        if column in TABLES_ONLY or column == "split":
            continue
        look = LOOKS.get(column, Look(title=column))
        points = [
            _points(named, column, look, steps_per_x=record.steps_per_epoch or 1.0 if by_epoch else 1.0)
            for record, named in zip(records, tables, strict=True)
        ]
        if len(records) > 1:
            lines = [
                (number, label, *_compared(of_run, column))
                for number, (label, of_run) in enumerate(zip(labels_of(records), points, strict=True))
                if of_run
            ]
        else:
            # A line's number, and so its color, depends on its name alone: it has the same color in all figures.
            names = list(tables[0])
            lines = [(names.index(name), name, name, table) for name, table in points[0].items()]
        series = [
            Series(name=label, color=color, dashes=dashes, has_dots=name in _EVALUATIONS, points=table)
            for number, label, name, table in lines
            for color, dashes in [line_style(number)]
        ]
        if series:
            charts.append(Chart(look=look, x="epoch" if by_epoch else "step", series=series))
    return charts


def _tables(record: RunRecord, *, is_compared: bool) -> dict[str, pd.DataFrame]:
    """Return the metrics of each line, by the line's name.

    A fork has its parent's metrics as attempt 0. In a comparison these would hide the parent's line.
    """
    tables = dict(record.metrics)
    if is_compared:
        tables = {name: table[table["attempt"] != 0] for name, table in tables.items()}
    train, evaluations = tables.pop("train"), tables.pop("eval")
    # A user's script may leave out the split of an evaluation, which then counts as a validation.
    splits = evaluations["split"].fillna("val")
    names = {"val": "validation", "test": "test", **{split: split for split in splits.unique() if split != "val"}}
    return {"training": train, **{name: evaluations[splits == split] for split, name in names.items()}, **tables}


def _points(
    tables: Mapping[str, pd.DataFrame], column: str, look: Look, *, steps_per_x: float
) -> dict[str, pd.DataFrame]:
    """Return the points of a metric for each line that has values, by the name of the line."""
    found = dict[str, pd.DataFrame]()
    for name, table in tables.items():
        if column not in table:
            continue
        values = table[column] * look.scale
        values = values[np.isfinite(values)]
        if values.empty:
            continue
        # Points are selected before the other columns are computed: a long run has millions of points.
        drawn = extremes(values, MOST_POINTS)
        points = {"x": table["step"][drawn] / steps_per_x, "value": values[drawn]}
        if look.noisy and name not in _EVALUATIONS and len(values) > _PLAIN_POINTS:
            # A centered average neither lags nor leads.
            points["trend"] = values.rolling(len(values) // _TREND_PART + 1, center=True, min_periods=1).mean()[drawn]
        found[name] = pd.DataFrame(points).reset_index(drop=True)
    return found


def extremes(values: pd.Series, most: int) -> pd.Index:
    """Return the index labels of at most `most` values: the lowest and the highest of each stretch of the line."""
    if len(values) <= most:
        return values.index
    stretches = np.arange(len(values)) * (most // 2 - 1) // len(values)
    grouped = values.groupby(stretches)
    return pd.Index(sorted({values.index[0], values.index[-1], *grouped.idxmin(), *grouped.idxmax()}))


def _compared(points: Mapping[str, pd.DataFrame], column: str) -> tuple[str, pd.DataFrame]:
    """Return the name and the points of the line that shows a run in a comparison: the validation, but for the loss."""
    preferred = [name for name in ("validation", "test") if column != "loss" and name in points]
    name = [*preferred, *points][0]
    return name, points[name]
