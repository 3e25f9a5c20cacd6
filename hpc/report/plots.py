"""The figures: one run with its attempts and interruptions, or several runs, as inlined SVG. Runs on the login node.

matplotlib draws with placeholder colors, which become the page's CSS variables, so that figures follow dark and light
mode. Text stays text, in the page's font.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from hpc.core.causes import Cause
from hpc.report.gather import RunRecord, labels_of

SERIES = 8
# Placeholders: no two alike, and none that matplotlib would use by itself.
COLORS = {
    name: f"#0101{number:02x}"
    for number, name in enumerate(["soft", "rule", "band", "bad", "mild", *(f"s{line + 1}" for line in range(SERIES))])
}
_STYLE: Any = {
    "svg.fonttype": "none",
    # Ids of clip paths and markers then follow from their content: the same run makes the same page.
    "svg.hashsalt": "torchrelay",
    "font.size": 11.0,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["soft"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLORS["rule"],
    "grid.linewidth": 0.7,
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.major.pad": 6.0,
    "ytick.major.pad": 6.0,
    "text.color": COLORS["soft"],
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
}
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
# Causes from outside the run.
_EXTERNAL = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})
# A line with fewer points is not smoothed; a longer one is averaged over 1/40 of it.
_PLAIN_POINTS, _SMOOTHED_PARTS = 60, 40


@dataclass(frozen=True, kw_only=True)
class PlotSize:
    """The size of a drawing: a phone gets its own, because text that is scaled down is too small to read."""

    name: str
    width: float
    """In CSS pixels, which are also points."""
    height: float
    points: int
    """The maximum number of points of a line."""


SIZES = (
    PlotSize(name="wide", width=540, height=280, points=2000),
    PlotSize(name="narrow", width=330, height=230, points=700),
)


def decimate(table: pd.DataFrame, column: str, most: int) -> pd.DataFrame:
    """At most `most` rows, evenly spread: of each stretch the lowest and the highest, so that no extreme is lost."""
    known = table[table[column].notna()].reset_index(drop=True)
    if len(known) <= most:
        return known
    stretches = np.arange(len(known)) * (most // 2 - 1) // len(known)
    grouped = known[column].groupby(stretches)
    keep = {0, len(known) - 1, *grouped.idxmin(), *grouped.idxmax()}
    return known.loc[sorted(keep)]


def smoothed(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The trend of a column: the centered moving average, which neither lags nor leads."""
    if len(table) <= _PLAIN_POINTS:
        return table
    window = table[column].rolling(len(table) // _SMOOTHED_PARTS + 1, center=True, min_periods=1)
    return table.assign(**{column: window.mean()})


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One kind of figure: a column of the metrics over the steps."""

    title: str
    column: str
    split: str | None = None
    """Of evaluations: on which part of the data; None: the column is of the training's metrics."""
    unit: Callable[[float], str]
    """A value as people write it."""

    def table(self, record: RunRecord) -> pd.DataFrame:
        """The rows of a run that it shows."""
        if self.split is None:
            return record.train
        return record.evaluations[record.evaluations["split"] == self.split]


LOSS = Chart(title="Loss", column="loss", unit="{:.3f}".format)
ACCURACY = Chart(title="Accuracy", column="accuracy", split="val", unit="{:.2%}".format)
SPEED = Chart(title="Images per second", column="images_per_second", unit="{:,.0f}".format)
RATE = Chart(title="Learning rate", column="lr", unit="{:.3g}".format)
CHARTS = (LOSS, ACCURACY, SPEED, RATE)
_NOISY = frozenset({LOSS, SPEED})
# A loss that falls by this factor is drawn on a logarithmic scale: its beginning would hide its end.
_LONG_FALL = 4.0
# The part of the data, what it is called, its sign and color in the key, and how it is drawn.
_EVALUATIONS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("val", "validation", "●", "s2", {"marker": "o", "markersize": 4, "linewidth": 1.2}),
    ("test", "test", "◆", "s3", {"marker": "D", "markersize": 7, "linestyle": "none"}),
)


def plots_of(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The figures of one or more runs; none without data.

    A figure has a title, a key (of each sign its color and its meaning), a description for those who cannot see it, and
    a drawing for each size, the content of an SVG element; the style sheet shows the one that fits.
    """
    shown = [chart for chart in CHARTS if any(chart.table(record)[chart.column].notna().any() for record in records)]
    return [_plot(chart, records) for chart in shown]


def _plot(chart: Chart, records: Sequence[RunRecord]) -> dict[str, Any]:
    steps = pd.concat([table["step"] for record in records for table in (record.train, record.evaluations)])
    last = max(1.0, float(steps.max()))

    def paint(axes: Axes, size: PlotSize) -> None:
        if len(records) == 1:
            _paint_run(axes, size, chart, records[0])
        else:
            _paint_runs(axes, size, chart, records)
        # The same steps in all figures, so that what happened at one is found in the others.
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6 if size.width > 400 else 4, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if _is_logarithmic(chart, records):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        if chart is ACCURACY:
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")
        if chart is SPEED:
            axes.yaxis.set_major_formatter("{x:,.0f}")
        if chart in {SPEED, RATE}:
            axes.set_ylim(bottom=0)

    key = _key(chart, records[0]) if len(records) == 1 else []
    key += [("", "soft", "logarithmic scale")] if _is_logarithmic(chart, records) else []
    drawings = draw(chart.column, paint)
    return {"title": chart.title, "key": key, "description": describe(chart, records), "drawings": drawings}


def _key(chart: Chart, record: RunRecord) -> list[tuple[str, str, str]]:
    """What the signs mean, if there are several."""
    if chart not in {LOSS, ACCURACY}:
        return []
    splits = set(record.evaluations["split"])
    training = [("━", "s1", "training")] if chart is LOSS else []
    return training + [(sign, color, name) for split, name, sign, color, _ in _EVALUATIONS if split in splits]


def _is_logarithmic(chart: Chart, records: Sequence[RunRecord]) -> bool:
    values = pd.concat([chart.table(record)[chart.column] for record in records])
    return chart is LOSS and bool(values.min() > 0) and bool(values.max() > _LONG_FALL * values.min())


def describe(chart: Chart, records: Sequence[RunRecord]) -> str:
    """A figure in words."""
    words = [f"{chart.title} by step."]
    for record, label in zip(records, labels_of(records), strict=True):
        table = chart.table(record).dropna(subset=[chart.column])
        if table.empty:
            words.append(f"{label}: not known.")
            continue
        values, steps, unit = table[chart.column], table["step"], chart.unit
        first, last = (f"{unit(values.iloc[i])} at step {steps.iloc[i]:.0f}" for i in (0, -1))
        words.append(f"{label}: from {first} to {last}, lowest {unit(values.min())}, highest {unit(values.max())}.")
    return " ".join(words)


def _paint_run(axes: Axes, size: PlotSize, chart: Chart, record: RunRecord) -> None:
    """One run: the raw line faint behind its trend, the evaluations, the attempts and the interruptions."""
    color = COLORS["s1"]
    if chart.split is None:
        trend = smoothed(record.train, chart.column) if chart in _NOISY else record.train
        if trend is not record.train:
            _line(axes, decimate(record.train, chart.column, size.points), chart, color=color, alpha=0.3, linewidth=0.9)
        _line(axes, decimate(trend, chart.column, size.points), chart, color=color)
    if chart in {LOSS, ACCURACY}:
        for split, _, _, evaluations_color, style in _EVALUATIONS:
            evaluations = record.evaluations[record.evaluations["split"] == split]
            rows = decimate(evaluations, chart.column, size.points // 4)
            if not rows.empty:
                _line(axes, rows, chart, color=COLORS[evaluations_color], zorder=3, clip_on=False, **style)
    _paint_attempts(axes, record.train)
    _paint_interruptions(axes, record.interruptions, record.train["step"].max())


def _line(axes: Axes, rows: pd.DataFrame, chart: Chart, **style: Any) -> None:
    axes.plot(rows["step"].to_numpy(), rows[chart.column].to_numpy(), **style)


def attempt_spans(train: pd.DataFrame) -> list[tuple[int, float, float]]:
    """For each attempt with productive steps: its number, its first and its last step."""
    lasts = train.groupby("attempt")["step"].max()
    starts = [float(train["step"].min()), *lasts.tolist()]
    return [(int(attempt), start, last) for (attempt, last), start in zip(lasts.items(), starts, strict=False)]


def _paint_attempts(axes: Axes, train: pd.DataFrame) -> None:
    """Every other attempt is shaded; those that are wide enough are named above."""
    spans = attempt_spans(train)
    if len(spans) < 2:
        return
    total = spans[-1][2] - spans[0][1]
    for number, (attempt, start, end) in enumerate(spans):
        if number % 2:
            axes.axvspan(start, end, color=COLORS["band"], linewidth=0, zorder=0)
        if end - start > total / 6:
            _write_above(axes, (start + end) / 2, 13, f"attempt {attempt}", color=COLORS["soft"])


def _paint_interruptions(axes: Axes, interruptions: pd.DataFrame, last: float) -> None:
    """A line for each, with its number at the top unless that would cover the one before."""
    marks = interruptions[interruptions["step"].notna()].sort_values("step")
    numbered, gap = -np.inf, last / 25
    for number, step, cause in zip(marks["number"], marks["step"], marks["cause"], strict=True):
        color = COLORS["mild" if cause in _EXTERNAL else "bad"]
        axes.axvline(step, color=color, linewidth=1.1, linestyle=(0, (3, 2)), zorder=1)
        if step - numbered > gap:
            numbered = step
            _write_above(axes, step, 1, str(int(number)), color=color)


def _write_above(axes: Axes, step: float, points: float, text: str, color: str) -> None:
    """Write text above the frame, at a distance in points."""
    style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 10, "color": color}
    frame = axes.get_xaxis_transform()
    axes.annotate(text, (step, 1), xycoords=frame, xytext=(0, points), textcoords="offset points", **style)


def line_style(number: int) -> tuple[str, int]:
    """The color and the dashes of a run in a comparison, by its number: every pair is used before one repeats."""
    return f"s{number % SERIES + 1}", number // SERIES % len(_DASHES)


def _paint_runs(axes: Axes, size: PlotSize, chart: Chart, records: Sequence[RunRecord]) -> None:
    """Several runs, one line each; together they have the points of a few."""
    most = max(100, 4 * size.points // len(records))
    for number, record in enumerate(records):
        color, dashes = line_style(number)
        table = chart.table(record)
        rows = decimate(smoothed(table, chart.column) if chart in _NOISY else table, chart.column, most)
        dots = {"marker": "o", "markersize": 3.5} if chart.split and len(rows) < 40 else {}
        _line(axes, rows, chart, color=COLORS[color], linestyle=_DASHES[dashes], linewidth=1.5, **dots)


def draw(name: str, paint: Callable[[Axes, PlotSize], None]) -> dict[PlotSize, Markup]:
    """Draw a figure in each size. `name` is unique on the page, for ids; `paint` uses `COLORS` only."""
    drawings = dict[PlotSize, Markup]()
    for size in SIZES:
        with rc_context(_STYLE):
            figure = Figure(figsize=(size.width / 72, size.height / 72), layout="constrained")
            axes = figure.subplots()
            axes.grid(visible=False, axis="x")
            paint(axes, size)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        # matplotlib has escaped the text in it.
        drawings[size] = Markup(_inlined(buffer.getvalue(), f"{name}-{size.name}"))  # noqa: S704
    return drawings


def _inlined(document: str, name: str) -> str:
    """The content of an SVG document, with unique ids, the page's colors, and coordinates to a tenth of a pixel."""
    inside = document[document.index('<g id="figure_1">') :]
    inside = re.sub(r'<g id="[^"]*">', "<g>", inside)
    inside = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", inside).replace("xlink:href", "href")
    inside = re.sub(r" font-family: [^;]*;", "", inside)
    # Only the coordinates of paths.
    inside = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"-?\d+\.\d+", _rounded, path[0]), inside)
    for color, placeholder in COLORS.items():
        inside = inside.replace(placeholder, f"var(--{color})")
    return re.sub(r"\n\s*", "\n", inside).removesuffix("</svg>\n")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")
