"""Makes the figures, which Bokeh draws in the reader's browser, with their data. Runs on the login node.

The data have a column for each x axis and each degree of smoothing; `templates/page.js` chooses among these columns.
Colors are for the light page: in dark mode the style sheet inverts whole figures.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HoverTool,
    LogTicker,
    NumeralTickFormatter,
    PanTool,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from hpc.report.charts import MOST_POINTS, Axis, Chart, Clock, Series, axes_of, charts_of, clock_for, extremes
from hpc.report.colors import COLORS
from hpc.report.formats import cause as cause_text
from hpc.report.formats import duration, known, number, plural
from hpc.report.gather import RunRecord
from hpc.run.causes import Cause

DEFAULT_SMOOTHING = "medium"
MOST_FIGURES = 40
# The largest number of points of all lines of a page together.
_ALL_POINTS = 16_000
# Causes that come from outside the run.
_EXTERNAL = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})
_FONT = {"text_font": "system-ui, sans-serif", "text_font_size": "12px", "text_color": COLORS["soft"]}


@dataclass(frozen=True, kw_only=True)
class Plots:
    """The figures of a page, as the template needs them."""

    charts: Sequence[Chart]
    axes: Sequence[Axis]
    """Quantities among which the reader chooses the x axis; empty if each figure has its own x axis."""
    has_trends: bool
    left_out: Sequence[str]
    """Titles of figures that would make the page too large."""
    data: dict[str, Any]
    """The input of `templates/page.js`: Bokeh's document, and the element of each figure."""


def bokeh_script() -> str:
    """Return Bokeh's own script, to embed in the page."""
    (script, *_) = Resources(mode="inline", components=["bokeh"]).js_raw
    return script


def plots_of(records: Sequence[RunRecord], now: float) -> Plots:
    """Return the figures of one or more runs, at most MOST_FIGURES, and the titles of the others."""
    clock = clock_for(records, now)
    charts = charts_of(records, clock)
    shown = charts[:MOST_FIGURES]
    axes = axes_of(shown, clock)
    most = min(MOST_POINTS, _ALL_POINTS // max(1, sum(len(chart.series) for chart in shown)))
    marks = _marks(records[0], clock, now) if len(records) == 1 else []
    # All figures share one x range, so that an event is at the same place in each of them.
    x_range = _range(axes[0]) if axes else Range1d()
    figures = [_draw(chart, most, marks, x_range, axes) for chart in shown]
    return _placed(shown, figures, axes, [chart.look.title for chart in charts[MOST_FIGURES:]])


def plots_by(charts: Sequence[tuple[Chart, Axis]]) -> Plots:
    """Return figures that each have their own x axis."""
    figures = [_draw(chart, MOST_POINTS, (), _range(axis), [axis]) for chart, axis in charts]
    return _placed([chart for chart, _ in charts], figures)


def _placed(
    charts: Sequence[Chart], figures: Sequence[figure], axes: Sequence[Axis] = (), left_out: Sequence[str] = ()
) -> Plots:
    document = Document(title="")
    for drawn in figures:
        document.add_root(drawn)
    return Plots(
        charts=charts,
        axes=axes,
        has_trends=any(_has_trend(one) for chart in charts for one in chart.series),
        left_out=left_out,
        data={
            "document": document.to_json(deferred=False),
            "elements": {drawn.id: f"plot-{position}" for position, drawn in enumerate(figures)},
            "axes": {axis.name: {"limits": axis.limits, "label": axis.label} for axis in axes},
        },
    )


def _range(axis: Axis) -> Range1d:
    start, end = axis.limits
    return Range1d(start=start, end=end)


def _draw(chart: Chart, most: int, marks: Sequence[dict[str, Any]], x_range: Range1d, axes: Sequence[Axis]) -> figure:
    logarithmic = chart.is_logarithmic
    box_zoom = BoxZoomTool()
    drawn = figure(
        height=270, sizing_mode="stretch_width", x_range=x_range, y_axis_type="log" if logarithmic else "linear",
        x_axis_type="log" if axes and axes[0].is_logarithmic else "linear",
        y_range=DataRange1d(start=0) if chart.look.from_zero else DataRange1d(),
        tools=[box_zoom, PanTool(), WheelZoomTool(dimensions="width"), ResetTool(), SaveTool()],
        toolbar_location="above", min_border=2, background_fill_color=None, border_fill_color=None,
        outline_line_color=None,
    )  # fmt: skip
    drawn.toolbar.update(logo=None, autohide=True, active_drag=box_zoom, active_scroll=None)
    drawn.toolbar.stylesheets = ["@media print { :host { visibility: hidden; } }"]
    _frame(drawn, axes, logarithmic=logarithmic)
    _draw_marks(drawn, marks)
    lines = [_draw_series(drawn, one, most) for one in chart.series]
    value, labelled = f"@value{{{chart.look.form}}}", "label" in chart.series[0].points
    places = [] if labelled else [(axis.label, _hovered(axis)) for axis in axes]
    drawn.add_tools(
        HoverTool(
            renderers=lines,
            # With many lines, the labels of all lines at one x would hide the figure.
            mode="vline" if len(lines) <= 4 and all(one.has_line for one in chart.series) else "mouse",
            tooltips=[("", "@label" if labelled else "$name"), (chart.look.title, value), *places],
            formatters={"@value": "printf"},
            visible=False,
        )
    )
    return drawn


def _hovered(axis: Axis) -> str:
    return "@step{0,0}" if axis.name == "step" else f"@{axis.name}{{0.00}}"


def _frame(drawn: figure, axes: Sequence[Axis], *, logarithmic: bool) -> None:
    for axis in drawn.axis:
        axis.update(axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None)
        axis.update(**{f"major_label_{name}": value for name, value in _FONT.items()})
    drawn.xgrid.grid_line_color = None
    drawn.ygrid.update(grid_line_color=COLORS["rule"], grid_line_alpha=0.6)
    drawn.xaxis.update(**{f"axis_label_{name}": value for name, value in _FONT.items()})
    drawn.xaxis.axis_label_text_font_style = "normal"
    drawn.xaxis.axis_label = axes[0].label if axes else ""
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    if axes and axes[0].is_logarithmic:
        drawn.xaxis.formatter = PrintfTickFormatter(format="%g")
    if axes and axes[0].ticks:
        drawn.xaxis.ticker = FixedTicker(ticks=list(axes[0].ticks))
        labels: dict[Any, Any] = {**axes[0].ticks}
        drawn.xaxis.major_label_overrides = labels
    if logarithmic:
        drawn.yaxis.formatter = BasicTickFormatter()
        drawn.yaxis.ticker = LogTicker(desired_num_ticks=4)


def _has_trend(series: Series) -> bool:
    return f"value_{DEFAULT_SMOOTHING}" in series.points


def _draw_series(drawn: figure, series: Series, most: int) -> Any:
    """Draw a line, faint behind its trend if it has one. Return the renderer whose values the mouse pointer shows."""
    has_trend, color = _has_trend(series), COLORS[series.color]
    points = series.points.loc[extremes(series.points["value"], most)]
    # 32 bits are more precise than a figure can show, and halve the size of the page.
    numbers = points.select_dtypes("number").astype("float32")
    source = ColumnDataSource({name: numbers.get(name, column).to_numpy() for name, column in points.items()})
    common: dict[str, Any] = {"x": "step", "source": source, "color": color, "name": series.name}
    dots = None
    if series.has_dots or len(points) < 40:
        dots = drawn.scatter(y="value", size=9 if len(points) == 1 else 5 if series.has_line else 8, **common)
    if not series.has_line:
        return dots
    style: dict[str, Any] = {"line_width": 1.7, "line_dash": series.dashes}
    if not has_trend:
        return drawn.line(y="value", **style, **common)
    drawn.line(y="value", alpha=0.3, line_width=1.0, **common)
    trend = drawn.line(y=f"value_{DEFAULT_SMOOTHING}", **style, **common)
    trend.tags = ["trend"]
    return trend


def _marks(record: RunRecord, clock: Clock, now: float) -> list[dict[str, Any]]:
    """Return strips that mark interruptions, queues and every second attempt, with ends in steps, epochs and time."""
    per_epoch, began = record.steps_per_epoch or np.nan, record.began or np.nan

    def strip(color: str, steps: tuple[float, float], times: tuple[float, float], text: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {"color": COLORS[color], "alpha": 0.5 if color == "shade" else 0.25, "text": text}
        for end, step, time in zip(("from", "to"), steps, times, strict=True):
            found |= {f"step_{end}": step, f"epoch_{end}": step / per_epoch}
            found[f"time_{end}"] = (time - began) / clock.unit_seconds
        return found

    attempts = [row for row in record.attempts.to_dict("records") if known(row["first_step"])]
    edges = [*(row["first_step"] for row in attempts), record.train["step"].max()]
    shades = [
        strip("shade", (row["first_step"], end), (row["started"], row["ended"] if known(row["ended"]) else now))
        for row, end in zip(attempts, edges[1:], strict=True)
    ][1::2]
    return [*shades, *_interruption_strips(record, strip, now)]


def _interruption_strips(
    record: RunRecord, strip: Callable[..., dict[str, Any]], now: float
) -> Iterator[dict[str, Any]]:
    rows = {int(row["number"]): row for row in record.interruptions.to_dict("records")}
    for period in record.periods(now):
        if period.interruption is None:
            continue
        row = rows[period.interruption]
        lost = row["steps_lost"] if known(row["steps_lost"]) else 0
        text = f"#{period.interruption} {cause_text(row['cause'])} at step {number(row['step'])}"
        if period.kind == "queue":
            steps, color, text = (row["step"], row["step"]), "queue", f"{text}: {duration(period.seconds)} in the queue"
        else:
            steps, color = (row["step"] - lost, row["step"]), "outside" if row["cause"] in _EXTERNAL else "failure"
            text = f"{text}: {duration(row['total_seconds'])}, {plural(int(lost), 'step')} lost"
        yield strip(color, steps, (period.began, period.ended), text)


def _draw_marks(drawn: figure, marks: Sequence[dict[str, Any]]) -> None:
    """Draw the marks; a recovery that lost no step is a line at its step."""
    for is_shade in (True, False):
        chosen = [mark for mark in marks if (mark["text"] == "") == is_shade]
        if not chosen:
            continue
        source = ColumnDataSource({key: [mark[key] for mark in chosen] for key in chosen[0]})
        strips = drawn.vstrip(
            x0="step_from", x1="step_to", source=source,
            fill_color="color", fill_alpha="alpha", line_color=None if is_shade else "color", line_alpha=0.6,
            name="attempts" if is_shade else "interruptions", level="underlay",
        )  # fmt: skip
        if not is_shade:
            drawn.add_tools(HoverTool(renderers=[strips], tooltips="@text", visible=False, point_policy="follow_mouse"))
