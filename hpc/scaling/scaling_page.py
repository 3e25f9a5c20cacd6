"""The page of a scaling study: speed against ranks, where the time goes, and losses against time. Pure."""

from collections.abc import Sequence
from html import escape

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.widgets import Div
from bokeh.palettes import Category10
from bokeh.plotting import figure
from bokeh.resources import INLINE

from hpc.scaling.measures import Curve, Measures
from hpc.scaling.scaling_dir import ScalingSpec

_COLORS = Category10[10]
_MUTED = "#55606e"
_STYLE = """
table { border-collapse: collapse; font: 14px system-ui, sans-serif }
td, th { padding: 3px 12px; text-align: right; border-bottom: 1px solid #d8dee6 }
th:first-child, td:first-child { text-align: left }
p, h1 { font-family: system-ui, sans-serif; max-width: 60em; margin: 8px 0 }
"""


def scaling_page(
    name: str,
    spec: ScalingSpec,
    measured: Sequence[Measures],
    rows: Sequence[tuple[str, Sequence[str]]],
    conclusions: Sequence[str],
) -> str:
    """The HTML of the page, without anything from the network."""
    known = [one for one in measured if one.images_per_second]
    mode = "the batch grows with the ranks" if spec.mode == "weak" else "the same batch for all"
    head = "".join(f"<th>{escape(one.size.name)}</th>" for one in measured)
    body = "".join(
        f"<tr><td>{escape(what)}</td>" + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"
        for what, values in rows
    )
    texts = "".join(f"<p>{escape(line)}</p>" for line in conclusions)
    text = (
        f"<h1>Scaling: {escape(name)}</h1><p>{spec.minutes:g} minutes for each size, nodes x GPUs per node; {mode}.</p>"
        f"{texts}<table><tr><th></th>{head}</tr>{body}</table>"
    )
    parts = [Div(text=text, stylesheets=[_STYLE], sizing_mode="stretch_width"), _speed(known), _shares(known)]
    for title, curves in (
        ("Training loss", [one.train_loss for one in known]),
        ("Validation loss", [one.validation_loss for one in known]),
    ):
        if any(curves):
            parts.append(_losses(title, [one.size.name for one in known], curves))
    page: str = file_html(column(*parts, sizing_mode="stretch_width"), INLINE, title=f"scaling {name}")
    return page


def _speed(known: Sequence[Measures]) -> figure:
    """Images per second by ranks, with a line for an efficiency of 100 %."""
    drawn = figure(
        height=360, sizing_mode="stretch_width", tools="save", title="Images per second",
        x_axis_label="ranks", y_range=Range1d(start=0, end=1.1 * max(_ideal(known, one) for one in known)),
    )  # fmt: skip
    ranks = [one.size.ranks for one in known]
    drawn.line(ranks, [_ideal(known, one) for one in known], color=_MUTED, line_dash="dashed", legend_label="ideal")
    source = ColumnDataSource({
        "ranks": ranks, "speed": [one.images_per_second for one in known], "name": [one.size.name for one in known],
        "share": [(one.images_per_second or 0.0) / _ideal(known, one) for one in known],
    })  # fmt: skip
    points = drawn.scatter("ranks", "speed", source=source, size=9, color=_COLORS[0], legend_label="measured")
    drawn.text("ranks", "speed", text="name", source=source, x_offset=8, y_offset=4, text_font_size="12px")
    tips = [("", "@name"), ("images per second", "@speed{0}"), ("efficiency", "@share{0%}")]
    drawn.add_tools(HoverTool(renderers=[points], tooltips=tips))
    drawn.xaxis.ticker = sorted({*ranks})
    drawn.legend.location = "top_left"
    return drawn


def _ideal(known: Sequence[Measures], one: Measures) -> float:
    first = known[0]
    return (first.images_per_second or 0.0) / first.size.ranks * one.size.ranks


def _shares(known: Sequence[Measures]) -> figure:
    """Where the time of a step goes."""
    names = [one.size.name for one in known]
    data = [one.data_wait_share or 0.0 for one in known]
    reduce = [one.allreduce_wait_share or 0.0 for one in known]
    rest = [max(0.0, 1 - a - b) for a, b in zip(data, reduce, strict=True)]
    parts = {"computing": rest, "waiting for the all-reduce": reduce, "waiting for data": data}
    drawn = figure(
        height=120 + 40 * len(names), sizing_mode="stretch_width", tools="hover,save", title="Time of a step",
        y_range=FactorRange(factors=names[::-1]), x_range=Range1d(start=0, end=1), tooltips="$name: @$name{0.0%}",
    )  # fmt: skip
    drawn.hbar_stack(
        list(parts), y="name", height=0.6, color=[_COLORS[0], _COLORS[1], _COLORS[2]],
        source=ColumnDataSource({"name": names, **parts}), legend_label=list(parts),
    )  # fmt: skip
    drawn.xaxis.formatter = NumeralTickFormatter(format="0%")
    drawn.add_layout(drawn.legend[0], "below")
    drawn.legend.orientation = "horizontal"
    return drawn


def _losses(title: str, names: Sequence[str], curves: Sequence[Curve]) -> figure:
    """A line for each size."""
    drawn = figure(
        height=360, sizing_mode="stretch_width", tools="pan,box_zoom,reset,save", title=title,
        x_axis_label="seconds of training",
    )  # fmt: skip
    for i, (name, curve) in enumerate(zip(names, curves, strict=True)):
        source = ColumnDataSource({"x": [at for at, _ in curve], "y": [loss for _, loss in curve]})
        line = drawn.line("x", "y", source=source, color=_COLORS[i % len(_COLORS)], legend_label=name, line_width=2)
        drawn.scatter("x", "y", source=source, color=_COLORS[i % len(_COLORS)], legend_label=name, size=4)
        drawn.add_tools(HoverTool(renderers=[line], tooltips=[(name, "@y{0.0000} after @x{0} s")]))
    drawn.legend.click_policy = "hide"
    return drawn
