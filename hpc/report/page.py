"""Makes the self-contained HTML page of a run or of a comparison. Pure; runs on the login node.

The templates escape whatever they print, except scripts.
"""

import base64
import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any

import jinja2
from markupsafe import Markup

from hpc.base.program import changed, words_of
from hpc.base.text import few
from hpc.programs.program_kinds import program_of_run, settings_of
from hpc.report.bokeh_figures import Plots, bokeh_script, plots_of
from hpc.report.charts import COLORS, line_style
from hpc.report.formats import FILTERS, UNKNOWN, duration, known, number, plural
from hpc.report.gather import RunRecord, labels_of
from hpc.run.events.interruptions import waits_of
from hpc.run.events.kinds import Preflight, Software
from hpc.run.spec import RunSpec
from hpc.status import cells
from hpc.status.details import largest_parts
from hpc.submissions.options import submit_flags

Column = tuple[str, Any, str]
"""The title of a column, its key in the rows, and the kind of its cells."""
# The CSS class of a column by the kind of its cells. Kinds that are not listed have the class `number`.
_SIDES = {"text": "", "cause": "", "moment": "", "run": "", "state": "", "words": "words", "wrapped": "wrapped"}
# Nobody reads a confusion matrix of more classes: a thousand classes would make a million cells.
_MAX_CLASSES = 30
# Color and meaning of the marks in the figures.
_MARKS = (
    ("failure", "a failure, with the steps that it cost"),
    ("outside", "a preemption or time limit"),
)


def run_page(record: RunRecord, tables: Sequence[str], now: float) -> str:
    """Return the HTML of a run's page. `tables` names the CSV files; `now` is in seconds since the epoch."""
    spec, evaluation = record.spec, _evaluation(record)
    return _render(
        "run.html",
        record=record,
        tables=tables,
        headline=_headline(record),
        causes=cells.interruptions(record.summary).replace("_", " "),
        facts=_facts(record),
        # An evaluation would have curves of a single point.
        plots=plots_of([] if evaluation else [record]),
        evaluation=evaluation,
        mark_legend=_MARKS,
        timeline=_timeline(record, now),
        interruptions=[_interruption_row(row) for row in record.interruptions],
        classes=record.confusion if len(record.confusion) <= _MAX_CLASSES else [],
        command=submit_command(spec) if spec and record.settings and not record.task else "",
        started_in=spec.start_directory(record.run) if spec else None,
    )


def comparison_page(records: Sequence[RunRecord], links: Sequence[str | None], tables: Sequence[str]) -> str:
    """Return the HTML of the page that compares runs. `links` has the path of each run's own page; None without one."""
    labels = labels_of(records)
    differing = _differing_settings(records)
    return _render(
        "comparison.html",
        tables=tables,
        runs=_runs(labels, records, links, differing),
        setting_columns=[(name, f"setting {name}", "wrapped") for name in differing],
        plots=plots_of(records),
        remarks=[
            f"{label}: {note}"
            for label, record in zip(labels, records, strict=True)
            for note in (*record.notes, *record.summary.warnings)
        ],
    )


def _headline(record: RunRecord) -> list[str]:
    """Return the parts of the line below the title: what ran, its main settings, and its nodes and GPUs."""
    if record.spec is None:
        return []
    resources, task = record.spec.resources, record.task
    words = program_of_run(record.spec).describe() if record.settings and not task else []
    words = [task.title, f"on {record.spec.data}"] if task else words
    count, kind = resources.gpus_per_node.count, resources.gpus_per_node.kind
    gpus = plural(count, f"{kind or ''} GPU".strip())
    gpus = f"{plural(count, 'rank')} on CPUs" if cells.is_on_cpu(record.summary) else gpus
    nodes = f"{resources.nodes} node{'s' * (resources.nodes.most > 1)}"
    return [*words, nodes + (f" × {gpus}" if count else " without GPUs")]  # noqa: RUF001 - times


def submit_command(spec: RunSpec) -> str:
    """Return the command that submits a run again, one flag per line; a script and its arguments share a line."""
    settings = words_of(changed(settings_of(spec), submit_flags(spec.script)))
    script = [shlex.join(["--", *spec.script])] if spec.script else []
    return " \\\n  ".join(["python -m hpc.submit", *map(shlex.quote, settings), *script])


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return the code, software, hardware, jobs and cost of a run, as names and values, without the unknown ones."""
    summary = record.summary
    newest, checked = record.history.last(Software) or Software(), record.history.of(Preflight)
    commit, plus, changed = (record.revision or "").partition("+")
    jobs = [attempt.job_id for attempt in summary.attempts] or [summary.job_id or ""]
    facts = {
        "Code": commit[:12] + plus + changed or "in no git repository",
        "torch": newest.torch,
        "CUDA": newest.cuda,
        "Driver": newest.driver,
        "Device": " and ".join(dict.fromkeys(event.device or "" for event in checked)),
        "Jobs": few(list(dict.fromkeys(jobs))),
        "Nodes": few(sorted({node for attempt in summary.attempts for node in attempt.nodes})),
        "Wait in the queue": summary.queue_seconds and duration(summary.queue_seconds),
        "Rank-hours" if cells.is_on_cpu(summary) else "GPU-hours": number(summary.gpu_hours, "{:.3g}"),
    }
    return [(name, str(value)) for name, value in facts.items() if value and value != UNKNOWN]


def _evaluation(record: RunRecord) -> dict[str, Any] | None:
    """Return the numbers of a run whose result comes from an evaluation without training; None for other runs."""
    table, makes_result = record.metrics["eval"], record.spec is not None and record.spec.program.writes_result
    return table.iloc[-1].to_dict() if makes_result and len(table) and record.metrics["train"].empty else None


def _interruption_row(row: Mapping[str, Any]) -> dict[str, Any]:
    rank = [f"rank {row['rank']}"] if row["rank"] is not None else []
    at_most = row["steps_lost_at_most"]
    return {
        **row,
        "at": row["failed_at"] or row["recorded_at"],
        "steps": number(row["steps_lost"]) if at_most is None else f"\N{LESS-THAN OR EQUAL TO} {at_most}",
        "where": ", ".join([*rank, *([row["node"]] if row["node"] else [])]),
        "parts": largest_parts(row["seconds"]).replace("_", " "),
    }


def _timeline(record: RunRecord, now: float) -> list[tuple[str, float, str]]:
    """Return the parts of a run's time in their order, as name, seconds and color; none before the first attempt."""
    attempts = record.history.attempts
    if not attempts:
        return []
    until = (attempts[-1].ended or record.history.events[-1].time) if record.has_ended else now
    waits, costs = waits_of(record.history, until), record.interruptions
    failures = [(one["failed_at"] or one["recorded_at"], one["total_seconds"]) for one in costs]
    # Where spans overlap, the earliest in this list counts.
    spans = [
        *(("queue", begin, end, "queue") for begin, end in waits),
        *(("recovery", begin, begin + seconds, "failure") for begin, seconds in failures if seconds is not None),
        *((f"attempt {one.attempt}", one.started, one.ended or until, "s3") for one in attempts),
        ("pause", waits[0][0], until, "soft"),
    ]
    edges = sorted({min(max(edge, waits[0][0]), until) for _, *span, _ in spans for edge in span})
    parts = [
        (next((name, color) for name, first, last, color in spans if first <= begin and end <= last), end - begin)
        for begin, end in pairwise(edges)
    ]
    return [(name, seconds, color) for (name, color), seconds in parts]


def _runs(
    labels: Sequence[str],
    records: Sequence[RunRecord],
    links: Sequence[str | None],
    differing: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    return [
        {
            **record.summary.document(),
            "run": label,
            "link": link,
            **dict(zip(("color", "dashes"), line_style(number), strict=True)),
            "best_validation": record.best_validation,
            "images_per_second": record.images_per_second,
            "interruptions": len(record.interruptions),
            "seconds_lost": record.seconds_lost,
            **{f"setting {name}": values[number] for name, values in differing.items()},
        }
        for number, (label, record, link) in enumerate(zip(labels, records, links, strict=True))
    ]


def _differing_settings(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings in which the runs differ, with the value in each run."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    values = {name: [_setting(record.settings.get(name)) for record in records] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def _setting(value: Any) -> str:
    return " ".join(map(str, value if isinstance(value, list) else [] if value in {None, ""} else [value])) or "default"


def _render(template: str, *, plots: Plots, tables: Sequence[str] = (), **values: Any) -> str:
    """Return the HTML of a page. `tables` names its CSV files."""
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
    values |= {"tables": tables, "now": time.time()}
    return environment.get_template(template).render(**values, plots=plots, scripts=scripts, script_hashes=hashes)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _formatted(value: object, kind: str) -> str:
    return FILTERS.get(kind, FILTERS["text"])(value)


def _with_values(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    return [column for column in columns if any(_formatted(row[column[1]], column[2]) != UNKNOWN for row in rows)]
