"""Renders the self-contained HTML pages of runs. Pure; runs on the login node.

The templates escape whatever they print, except scripts.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from hpc.report.bokeh_figures import Plots, bokeh_script
from hpc.report.charts import COLORS
from hpc.report.formats import FILTERS, UNKNOWN, known

Column = tuple[str, Any, str]
"""The title of a column, its key in the rows, and the kind of its cells."""
# The CSS class of a column by the kind of its cells. Kinds that are not listed have the class `number`.
_SIDES = {"text": "", "cause": "", "moment": "", "run": "", "state": "", "words": "words", "wrapped": "wrapped"}


def render(
    template: str, *, plots: Plots, tables: Sequence[str] = (), reload_seconds: int | None = None, **values: Any
) -> str:
    """Return the HTML of a page. `tables` names its CSV files; if `reload_seconds` is set, the page reloads itself."""
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
    environment.globals |= {"unknown": UNKNOWN, "colors": COLORS}
    # JSON keys must keep their order, because Bokeh reads its models in this order.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    own = resources.files("hpc.report").joinpath("templates", "page.js").read_text(encoding="utf-8")
    # These scripts are ours and contain no text from a run.
    scripts = [Markup(script) for script in ([bokeh_script()] if plots.charts else []) + [own]]  # noqa: S704
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    values |= {"tables": tables, "reload_seconds": reload_seconds, "now": time.time()}
    return environment.get_template(template).render(**values, plots=plots, scripts=scripts, script_hashes=hashes)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _formatted(value: object, kind: str) -> str:
    return FILTERS.get(kind, FILTERS["text"])(value)


def _with_values(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    return [column for column in columns if any(_formatted(row[column[1]], column[2]) != UNKNOWN for row in rows)]
