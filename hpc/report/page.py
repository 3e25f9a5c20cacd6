"""The page of one run. Pure; runs on the login node."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from hpc.report import parts
from hpc.report.command import for_people, submit_command
from hpc.report.gather import RunRecord
from hpc.report.markup import Markup, tag
from hpc.report.plots import attempt_spans, charts_of
from hpc.report.results import test_section
from hpc.report.write import duration, moment, number, percent, text
from hpc.spec import RunSpec


def run_page(record: RunRecord, tables: Sequence[str], now: float) -> str:
    """The HTML of the page.

    Args:
        record: the run.
        tables: the names of the CSV files beside the page.
        now: seconds since the epoch.
    """
    return parts.document(
        f"{record.run.name} · run report",
        _header(record),
        parts.tiles(_facts(record, now)),
        parts.notes_of([*record.notes, *record.summary["warnings"]]),
        _training(record),
        _interruptions(record, now),
        test_section(record),
        _reproduction(record),
        parts.section("Tables", parts.card(parts.files(tables)), intro="The numbers behind this page, as CSV."),
        parts.footer(now),
    )


def _header(record: RunRecord) -> Markup:
    summary = record.summary
    waits = tag("span", f"({summary['reason']})", class_="soft") if summary["reason"] not in {None, "None"} else None
    # What the ranks said last is of interest if that was the end.
    words = summary["detail"] if summary["state"] == "failed" else None
    return tag(
        "header",
        tag("div", tag("h1", record.run.name), parts.pill(summary["state"]), waits, class_="title"),
        tag("p", " · ".join(_in_short(record.spec)), class_="soft") if record.spec else None,
        tag("p", "The run has failed. Its last words: ", tag("code", words), class_="notes") if words else None,
    )


def _in_short(spec: RunSpec) -> list[str]:
    """What ran where."""
    nodes, gpus = spec.resources.nodes, spec.resources.gpus_per_node
    where = f"{nodes} node{'s' * (nodes != '1')} × {gpus} GPU{'s' * (gpus != 1)}"  # noqa: RUF001 - times
    if spec.train is None:
        return [" ".join(spec.script), where]
    train = spec.train
    sizes = f"{train.epochs} epochs, batch size {train.batch_size:,}"
    return [f"{train.model} on {train.data}", sizes, f"{train.optimizer}, lr {train.lr:g}", f"seed {train.seed}", where]


def _facts(record: RunRecord, now: float) -> list[tuple[str, str, str | None]]:
    summary, validations = record.summary, record.evaluations[record.evaluations["split"] == "val"]
    of_all = f"of {summary['total_steps']:,}" if summary["total_steps"] else None
    eta, of_best = summary["eta_seconds"], summary["best_test_accuracy"]
    recovery = ", ".join(f"{cost['count']} {cause.replace('_', ' ')}" for cause, cost in summary["recovery"].items())
    attempts = len(record.attempts)
    return [
        ("Test accuracy", percent(summary["test_accuracy"]), f"{percent(of_best)} in best/" if of_best else None),
        ("Best validation", percent(validations["accuracy"].max()), None),
        ("Training loss", number(summary["train_loss"], "{:.4f}"), None),
        ("Step", number(summary["step"]), of_all),
        ("Images/s", number(record.train["images_per_second"].median()), "median"),
        ("Ranks", number(summary["world_size"]), None),
        ("Goodput", number(summary["goodput"], "{:.1%}"), "of the time in steps that count"),
        ("Duration", duration(parts.wall_seconds(record, now)), f"{duration(eta)} left" if eta is not None else None),
        ("Interruptions", number(len(record.interruptions)), recovery or None),
        ("Attempts", number(attempts), f"{number(summary['steps_lost'])} steps made again" if attempts else None),
    ]


def _training(record: RunRecord) -> Markup | None:
    charts = charts_of([record])
    if not charts:
        return None
    marks = []
    if len(attempt_spans(record.train)) > 1:
        marks.append("Every other attempt is shaded.")
    if record.interruptions["step"].notna().any():
        marks.append(
            "Dashed lines are interruptions, with their numbers in the table below: red ones are failures, yellow ones "
            "came from outside."
        )
    return parts.section("Training", tag("div", *charts, class_="grid"), intro=" ".join(marks) or None)


def _interruptions(record: RunRecord, now: float) -> Markup | None:
    if record.attempts.empty:
        return None
    rows = record.interruptions
    groups = {str(cause).replace("_", " "): same for cause, same in rows.groupby("cause", sort=False)}
    lost = parts.lost_time(groups)
    return parts.section(
        "Time and interruptions",
        _where_time_went(record, now),
        parts.card(lost, title="Time lost, by cause") if lost else None,
        parts.card(_interruptions_table(rows), title="Interruptions") if len(rows) else None,
        parts.card(_attempts_table(record.attempts), title="Attempts"),
        intro=None if len(rows) else "Nothing interrupted this run.",
    )


_TIMES = {
    "steps that count": ("s3", None),
    "start": ("s1", "until the first attempt trained"),
    "interruptions": ("bad", "until the run was back, as far as that is known"),
    "the rest": ("rule", "evaluation, saving, steps that were made again"),
}


def _where_time_went(record: RunRecord, now: float) -> Markup | None:
    """The whole of the run's time, parted."""
    whole, trained = parts.wall_seconds(record, now), record.train["train_seconds"].max()
    if not whole or whole <= 0 or pd.isna(trained):
        return None
    began = record.attempts["started"].iloc[0]
    shares = {
        "steps that count": float(trained),
        "start": max(0.0, (record.trained_from or began) - began),
        "interruptions": float(record.interruptions["total_seconds"].sum()),
    }
    shares["the rest"] = max(0.0, whole - sum(shares.values()))
    whole = max(whole, sum(shares.values()))
    colors = {name: color for name, (color, _) in _TIMES.items()}
    items = [
        (color, f"{name} {duration(shares[name])}", f"({meaning})" if meaning else None)
        for name, (color, meaning) in _TIMES.items()
        if shares[name] > 0
    ]
    return parts.card(
        parts.bar("Where the time went", shares, colors, whole), parts.legend(items), title="Where the time went"
    )


def _interruptions_table(rows: pd.DataFrame) -> Markup:
    header = ("#", "when", "cause", "attempt", "step", "where", "steps lost", "time lost", "what it said")
    cells = [
        [
            number(row["number"]),
            moment(row["noted"] if pd.isna(row["failed_at"]) else row["failed_at"]),
            text(row["cause"]).replace("_", " "),
            number(row["attempt"]),
            number(row["step"]),
            " ".join([text(row["node"]), *([] if pd.isna(row["rank"]) else [f"rank {row['rank']:.0f}"])]),
            number(row["steps_lost"]),
            duration(row["total_seconds"]),
            text(row["detail"]),
        ]
        for row in _rows(rows)
    ]
    return parts.table("Interruptions", header, cells, left=("when", "cause", "where", "what it said"), stacks=True)


def _attempts_table(rows: pd.DataFrame) -> Markup:
    header = ("#", "began", "lasted", "first step", "last step", "ended", "nodes", "job", "what it said")
    cells = [
        [
            number(row["attempt"]),
            moment(row["started"]),
            duration(row["seconds"]),
            number(row["first_step"]),
            number(row["last_step"]),
            text(row["cause"]).replace("_", " "),
            text(row["nodes"]),
            text(row["job_id"]),
            text(row["detail"]),
        ]
        for row in _rows(rows)
    ]
    return parts.table("Attempts", header, cells, left=("began", "ended", "nodes", "job", "what it said"), stacks=True)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]


def _reproduction(record: RunRecord) -> Markup | None:
    spec = record.spec
    if spec is None:
        return None
    settings = [(name, value) for name, value in flat_settings(spec).items() if value not in {None, ""}]
    return parts.section(
        "Reproduce it",
        parts.card(
            parts.code(for_people(submit_command(spec))),
            tag("p", "It ran the code in ", tag("code", str(record.run.code)), ".", class_="soft"),
            parts.details(
                "All settings",
                parts.table("Settings", ("setting", "value"), settings, left=("setting", "value")),
            ),
        ),
        intro="Submits the same run again. Settings that are not named have their defaults.",
    )


def flat_settings(spec: RunSpec) -> dict[str, str]:
    """Every setting of a run by its flag's name."""
    fields = asdict(spec)
    nested = {**fields.pop("resources"), **fields.pop("recovery"), **(fields.pop("train") or {})}
    merged = {**fields, **nested, "data": nested.get("data") or fields["data"]}
    return {name.replace("_", "-"): _setting(value) for name, value in merged.items()}


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
