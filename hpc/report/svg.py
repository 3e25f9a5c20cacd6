"""Figures as inlined SVG that take their colors from the page, so that they follow dark and light.

Runs on the login node. matplotlib draws with stand-ins for colors, which become the page's CSS variables. Text stays
text, in the page's font.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc.report.markup import Markup, join, tag

SERIES = 8
# Stand-ins: no two alike, and none that matplotlib would use by itself.
COLORS = {
    name: f"#0101{number:02x}"
    for number, name in enumerate(
        ("soft", "rule", "band", "bad", "mild", *(f"s{series}" for series in range(1, SERIES + 1)))
    )
}
_STYLE: Any = {
    "svg.fonttype": "none",
    # Names of clip paths and markers follow from their content, so a page is the same each time.
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
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One rendering of a figure: a phone gets its own, or its text would be too small to read."""

    name: str
    width: float
    """In CSS pixels, which are also points."""
    height: float
    points: int
    """The most points that a line is drawn with."""


SIZES = (Size(name="wide", width=540, height=280, points=2000), Size(name="narrow", width=330, height=230, points=700))


def figure(
    name: str, title: str, key: Sequence[tuple[str, str, str]], description: str, paint: Callable[[Axes, Size], None]
) -> Markup:
    """A figure with its heading, drawn once for each size; the style sheet shows the one that fits.

    Args:
        name: unique on the page, for ids.
        title: the heading.
        key: what is drawn how, each with a sign, its color's name, and what it stands for.
        description: for those who cannot see it.
        paint: draws on axes, with `COLORS` only.
    """
    drawn = [tag("div", _svg(f"{name}-{size.name}", description, paint, size), class_=size.name) for size in SIZES]
    signs = [
        tag("span", tag("span", sign, style=f"color:var(--{color})"), f" {meaning}") for sign, color, meaning in key
    ]
    caption = tag("figcaption", tag("h3", title), tag("div", *signs, class_="key"))
    return tag("figure", caption, join(drawn), class_="card")


def _svg(name: str, description: str, paint: Callable[[Axes, Size], None], size: Size) -> Markup:
    with rc_context(_STYLE):
        drawing = Figure(figsize=(size.width / 72, size.height / 72), layout="constrained")
        axes = drawing.subplots()
        axes.grid(visible=False, axis="x")
        paint(axes, size)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    opened = tag("svg", viewBox=f"0 0 {size.width:g} {size.height:g}", role="img", aria_label=description)
    return Markup(opened.replace("</svg>", _inlined(buffer.getvalue(), name)))


def _inlined(document: str, name: str) -> str:
    """What is inside an SVG document, with ids of its own, colors of the page, and no needless digits."""
    inside = document[document.index('<g id="figure_1">') :]
    inside = re.sub(r'<g id="[^"]*">', "<g>", inside)
    inside = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", inside).replace("xlink:href", "href")
    inside = re.sub(r" font-family: [^;]*;", "", inside)
    inside = re.sub(r'(?<= d=")[^"]*', lambda path: _shortened(path[0]), inside)
    for color, stand_in in COLORS.items():
        inside = inside.replace(stand_in, f"var(--{color})")
    return re.sub(r"\n\s*", "\n", inside)


def _shortened(path: str) -> str:
    """A path to the tenth of a pixel. One that is drawn at another scale would be spoiled, and there is none."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
