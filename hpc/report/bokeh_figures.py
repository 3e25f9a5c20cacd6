"""Makes the figures, which Bokeh draws in the reader's browser, with their data. Runs on the login node.

Colors are for the light page: in dark mode the style sheet inverts whole figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.document import Document
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    DataRange1d,
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

from hpc.report.charts import COLORS, Chart, Series, charts_of
from hpc.report.formats import cause as cause_text
from hpc.report.formats import duration, plural
from hpc.report.gather import RunRecord
from hpc.run.causes import Cause

_MOST_FIGURES = 40
# Causes that come from outside the run.
_EXTERNAL = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


@dataclass(frozen=True, kw_only=True)
class Plots:
    """The figures of a page, as the template needs them."""

    charts: Sequence[Chart]
    left_out: Sequence[str] = ()
    """Titles of figures that would make the page too large."""
    data: dict[str, Any]
    """The input of `templates/page.js`: Bokeh's document, and the element of each figure."""


def bokeh_script() -> str:
    """Return Bokeh's own script, to embed in the page."""
    (script, *_) = Resources(mode="inline", components=["bokeh"]).js_raw
    return script


def plots_of(records: Sequence[RunRecord]) -> Plots:
    """Return the figures of one or more runs, at most _MOST_FIGURES, and the titles of the others."""
    charts = charts_of(records)
    shown, left_out = charts[:_MOST_FIGURES], [chart.look.title for chart in charts[_MOST_FIGURES:]]
    marks = _marks(records[0]) if len(records) == 1 else []
    # All figures share one x range, so that an event is at the same place in each of them.
    largest = max([1e-6, *(float(series.points["x"].max()) for chart in shown for series in chart.series)])
    x_range = Range1d(start=-0.02 * largest, end=1.02 * largest)
    document = Document(title="")
    document.theme = "light_minimal"
    # Without this, the document would collect all models again for each figure.
    with document.models.freeze():
        for chart in shown:
            document.add_root(_draw(chart, marks, x_range))
    elements = {drawn.id: f"plot-{position}" for position, drawn in enumerate(document.roots)}
    data = {"document": document.to_json(deferred=False), "elements": elements}
    return Plots(charts=shown, left_out=left_out, data=data)


def _draw(chart: Chart, marks: Sequence[dict[str, Any]], x_range: Range1d) -> figure:
    box_zoom = BoxZoomTool()
    drawn = figure(
        height=230, sizing_mode="stretch_width", x_range=x_range, x_axis_label=chart.x,
        y_axis_type="log" if chart.is_logarithmic else "linear",
        y_range=DataRange1d(start=0) if chart.look.from_zero else DataRange1d(),
        tools=[box_zoom, PanTool(), WheelZoomTool(dimensions="width"), ResetTool(), SaveTool()],
        toolbar_location="above", min_border=2, background_fill_color=None, border_fill_color=None,
        outline_line_color=None,
    )  # fmt: skip
    drawn.toolbar.update(logo=None, autohide=True, active_drag=box_zoom, active_scroll=None)
    drawn.toolbar.stylesheets = ["@media print { :host { visibility: hidden; } }"]
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    if chart.is_logarithmic:
        drawn.yaxis.update(formatter=PrintfTickFormatter(format="%g"), ticker=LogTicker(desired_num_ticks=4))
    _draw_marks(drawn, marks)
    lines = [_draw_series(drawn, one) for one in chart.series]
    drawn.add_tools(
        HoverTool(
            renderers=lines,
            # With many lines, the labels of all lines at one x would hide the figure.
            mode="vline" if len(lines) <= 4 else "mouse",
            tooltips=[("", "$name"), (chart.look.title, "@value{%.5g}"), (chart.x, "@x{0,0.[00]}")],
            formatters={"@value": "printf"},
            visible=False,
        )
    )
    return drawn


def _draw_series(drawn: figure, series: Series) -> Any:
    """Draw a line, faint behind its trend if it has one. Return the renderer whose values the mouse pointer shows."""
    points, color = series.points, COLORS[series.color]
    # 32 bits are more precise than a figure can show, and halve the size of the page.
    numbers = points.select_dtypes("number").astype("float32")
    source = ColumnDataSource({name: numbers.get(name, column).to_numpy() for name, column in points.items()})
    common: dict[str, Any] = {"x": "x", "source": source, "color": color, "name": series.name}
    if series.has_dots or len(points) < 40:
        drawn.scatter(y="value", size=9 if len(points) == 1 else 5, **common)
    style: dict[str, Any] = {"line_width": 1.7, "line_dash": series.dashes}
    if "trend" not in points:
        return drawn.line(y="value", **style, **common)
    drawn.line(y="value", alpha=0.3, line_width=1.0, **common)
    return drawn.line(y="trend", **style, **common)


def _marks(record: RunRecord) -> list[dict[str, Any]]:
    """Return a strip for each interruption, over the steps that it cost."""
    return [
        {
            "start": row["step"] - (row["steps_lost"] or 0),
            "end": row["step"],
            "color": COLORS["outside" if row["cause"] in _EXTERNAL else "failure"],
            "text": f"#{row['number']} {cause_text(row['cause'])} at step {row['step']:,}: "
            f"{duration(row['total_seconds'])}, {plural(row['steps_lost'], 'step')} lost",
        }
        for row in record.interruptions
        if row["step"] is not None
    ]


def _draw_marks(drawn: figure, marks: Sequence[dict[str, Any]]) -> None:
    """Draw the marks; a recovery that lost no step is a line at its step."""
    if not marks:
        return
    strips = drawn.vstrip(
        x0="start", x1="end", source=ColumnDataSource({key: [mark[key] for mark in marks] for key in marks[0]}),
        fill_color="color", fill_alpha=0.25, line_color="color", line_alpha=0.6, name="interruptions", level="underlay",
    )  # fmt: skip
    drawn.add_tools(HoverTool(renderers=[strips], tooltips="@text", visible=False, point_policy="follow_mouse"))
