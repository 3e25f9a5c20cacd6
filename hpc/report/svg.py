"""Figures as inlined SVG that take their colors from the page, so that they follow dark and light mode.

Runs on the login node. matplotlib draws with placeholder colors, which become the page's CSS variables. Text stays
text, in the page's font.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SERIES = 8
# Placeholders: no two alike, and none that matplotlib would use by itself.
COLORS = {
    name: f"#0101{number:02x}"
    for number, name in enumerate(
        ("soft", "rule", "band", "bad", "mild", *(f"s{series}" for series in range(1, SERIES + 1)))
    )
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
    "lines.solid_joinstyle": "round",
}


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


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure, drawn once for each size; the style sheet shows the one that fits."""

    title: str
    key: Sequence[tuple[str, str, str]]
    """What is drawn how: a sign, its color's name, and what it stands for."""
    description: str
    """For those who cannot see it."""
    drawings: Mapping[PlotSize, Markup]
    """The content of an SVG element."""


def draw(name: str, paint: Callable[[Axes, PlotSize], None]) -> dict[PlotSize, Markup]:
    """Draw a figure in each size.

    Args:
        name: unique on the page, for ids.
        paint: draws on axes, with `COLORS` only.
    """
    return {size: _drawing(f"{name}-{size.name}", paint, size) for size in SIZES}


def _drawing(name: str, paint: Callable[[Axes, PlotSize], None], size: PlotSize) -> Markup:
    with rc_context(_STYLE):
        figure = Figure(figsize=(size.width / 72, size.height / 72), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False, axis="x")
        paint(axes, size)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # matplotlib has escaped the text in it.
    return Markup(_inlined(buffer.getvalue(), name).removesuffix("</svg>\n"))  # noqa: S704


def _inlined(document: str, name: str) -> str:
    """The content of an SVG document, with unique ids, the page's colors, and coordinates to a tenth of a pixel."""
    inside = document[document.index('<g id="figure_1">') :]
    inside = re.sub(r'<g id="[^"]*">', "<g>", inside)
    inside = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", inside).replace("xlink:href", "href")
    inside = re.sub(r" font-family: [^;]*;", "", inside)
    inside = re.sub(r'(?<= d=")[^"]*', lambda path: _rounded(path[0]), inside)
    for color, placeholder in COLORS.items():
        inside = inside.replace(placeholder, f"var(--{color})")
    return re.sub(r"\n\s*", "\n", inside)


def _rounded(path: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
