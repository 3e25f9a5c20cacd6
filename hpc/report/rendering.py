"""Renders the self-contained HTML pages of runs, sweeps and scaling studies. Pure; runs on the login node.

The templates escape whatever they print, except scripts.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from hpc.report import formats
from hpc.report.bokeh_figures import DEFAULT_SMOOTHING, Plots, bokeh_script, plots_by
from hpc.report.charts import SMOOTHINGS, Axis, Chart
from hpc.report.colors import COLORS
from hpc.report.formats import FILTERS, UNKNOWN, known

Column = tuple[str, Any, str]
"""The title of a column, its key in the rows, and the kind of its cells."""
# The CSS class of a column by the kind of its cells. Kinds that are not listed have the class `number`.
_SIDES = {"text": "", "cause": "", "moment": "", "run": "", "state": "", "words": "words", "wrapped": "wrapped"}
_KINDS = {"words": "text", "wrapped": "text", "digits": "text", "meter": "percent", "run": "text", "state": "text"}


def render(template: str, *, plots: Plots, written_by: str = "hpc report", **values: Any) -> str:
    """Return the HTML of a page. `written_by` is the command that the page names as its writer."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpc.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {**FILTERS, "formatted": _formatted, "with_values": _with_values}
    environment.filters["side"] = lambda kind: _SIDES.get(kind, "number")
    environment.tests["known"] = known
    environment.globals |= {"unknown": UNKNOWN, "colors": COLORS, "smoothings": list(SMOOTHINGS)}
    # JSON keys must keep their order, because Bokeh reads its models in this order.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.globals |= {"default_smoothing": DEFAULT_SMOOTHING}
    own = resources.files("hpc.report").joinpath("templates", "page.js").read_text(encoding="utf-8")
    # These scripts are ours and contain no text from a run.
    scripts = [Markup(script) for script in ([bokeh_script()] if plots.charts else []) + [own]]  # noqa: S704
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return environment.get_template(template).render(
        **values, plots=plots, written_by=written_by, scripts=scripts, script_hashes=hashes
    )


@dataclass(frozen=True, kw_only=True)
class GroupPage:
    """The content of the page of a sweep or a scaling study."""

    name: str
    kind: str
    headline: Sequence[str]
    findings: Sequence[str]
    """Sentences about the results."""
    shell: str = ""
    """Command that trains with the best settings; empty if there is none."""
    results: Sequence[tuple[str, Sequence[Column], Sequence[dict[str, Any]]]]
    """Title, columns and rows of each table."""
    shares: Sequence[tuple[str, Sequence[tuple[str, float, str]]]] = ()
    """Each run's name with the parts of its time: name, share (0 to 1) and color."""
    figures_title: str
    figures: Sequence[tuple[Chart, Axis]]

    def html(self, now: float) -> str:
        """Return the HTML; `now` is in seconds since the epoch."""
        written_by, plots = "hpc " + self.kind.split()[0], plots_by(self.figures)
        return render(
            "group.html", page=self, plots=plots, now=now, tables=(), reload_seconds=None, written_by=written_by
        )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _formatted(value: object, kind: str) -> str:
    return formats.number(value, "{:.4f}") if kind == "loss" else FILTERS[_KINDS.get(kind, kind)](value)


def _with_values(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    return [column for column in columns if any(_formatted(row[column[1]], column[2]) != UNKNOWN for row in rows)]
