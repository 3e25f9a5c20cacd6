"""The page that compares runs. Pure; runs on the login node."""

from collections.abc import Sequence

import pandas as pd

from hpc.report import parts
from hpc.report.command import for_people, submit_command
from hpc.report.gather import RunRecord
from hpc.report.markup import Markup, tag
from hpc.report.page import flat_settings
from hpc.report.plots import charts_of, look_of
from hpc.report.tables import labels_of
from hpc.report.write import duration, number, percent, text

_MOST_CLASSES = 30
# What differs between any two runs.
_OWN = {"name"}


def comparison_page(
    records: Sequence[RunRecord], links: Sequence[str | None], tables: Sequence[str], now: float
) -> str:
    """The HTML of the page.

    Args:
        records: the runs.
        links: to their own pages, for those that have one.
        tables: the names of the CSV files beside the page.
        now: seconds since the epoch.
    """
    labels = labels_of(records)
    charts = charts_of(records)
    return parts.document(
        f"{len(records)} runs compared",
        tag("header", tag("div", tag("h1", f"{len(records)} runs compared"), class_="title")),
        parts.section("Runs", parts.card(_runs(records, labels, links, now))),
        parts.section("Training", tag("div", *charts, class_="grid"), intro="The colors are those of the runs above.")
        if charts
        else None,
        _lost(records, labels),
        _classes(records, labels),
        _settings(records, labels),
        _notes(records, labels),
        _commands(records, labels),
        parts.section("Tables", parts.card(parts.files(tables)), intro="The numbers behind this page, as CSV."),
        parts.footer(now),
    )


def swatch(place: int) -> Markup:
    """The line of a run in the figures."""
    color, dashes = look_of(place)
    return tag("i", class_=f"swatch dashes-{dashes}", style=f"--line:var(--{color})")


def _runs(records: Sequence[RunRecord], labels: Sequence[str], links: Sequence[str | None], now: float) -> Markup:
    header = (
        *("run", "state", "test accuracy", "best validation", "loss", "step", "images/s"),
        *("goodput", "interruptions", "steps lost", "duration"),
    )
    accuracies = [record.summary["test_accuracy"] for record in records]
    best = max((accuracy for accuracy in accuracies if accuracy is not None), default=None)
    rows = [
        [
            tag("span", swatch(place), tag("a", label, href=link) if link else label, class_="run"),
            parts.pill(record.summary["state"]),
            tag("b" if accuracy is not None and accuracy == best else "span", percent(accuracy)),
            percent(record.evaluations[record.evaluations["split"] == "val"]["accuracy"].max()),
            number(record.summary["train_loss"], "{:.4f}"),
            number(record.summary["step"]),
            number(record.train["images_per_second"].median()),
            number(record.summary["goodput"], "{:.1%}"),
            number(len(record.interruptions)),
            number(record.summary["steps_lost"]),
            duration(parts.wall_seconds(record, now)),
        ]
        for place, (record, label, link, accuracy) in enumerate(zip(records, labels, links, accuracies, strict=True))
    ]
    return parts.table("Runs", header, rows, left=("run", "state"), stacks=True)


def _lost(records: Sequence[RunRecord], labels: Sequence[str]) -> Markup | None:
    every = pd.concat([record.interruptions for record in records if len(record.interruptions)] or [pd.DataFrame()])
    if every.empty:
        return None
    by_run = {label: record.interruptions for label, record in zip(labels, records, strict=True)}
    by_cause = {str(cause).replace("_", " "): rows for cause, rows in every.groupby("cause", sort=False)}
    return parts.section(
        "Time lost",
        tag(
            "div",
            parts.card(parts.lost_time(by_run), title="By run"),
            parts.card(parts.lost_time(by_cause), title="By cause, all runs together"),
            class_="grid",
        ),
    )


def _classes(records: Sequence[RunRecord], labels: Sequence[str]) -> Markup | None:
    """The accuracy of each class in each run, if they have the same few classes."""
    tested = [(label, record.classes) for label, record in zip(labels, records, strict=True) if len(record.classes)]
    names = {tuple(classes["class"]) for _, classes in tested}
    if len(names) != 1 or len(tested) < 2 or len(tested[0][1]) > _MOST_CLASSES:
        return None
    header = ("class", *(label for label, _ in tested))
    columns = [classes["accuracy"] for _, classes in tested]
    rows = [
        [name, *(tag("b" if value == max(values) else "span", percent(value)) for value in values)]
        for name, *values in zip(tested[0][1]["class"], *columns, strict=True)
    ]
    content = parts.table("Test accuracy by class", header, rows, left=("class",))
    return parts.section("Test accuracy by class", parts.card(content))


def _settings(records: Sequence[RunRecord], labels: Sequence[str]) -> Markup | None:
    """The settings in which the runs differ."""
    known = [(label, flat_settings(record.spec)) for label, record in zip(labels, records, strict=True) if record.spec]
    names = list(dict.fromkeys(name for _, settings in known for name in settings))
    differing = [name for name in names if name not in _OWN and len({one.get(name) for _, one in known}) > 1]
    if not differing:
        return parts.section("Settings", intro="The runs have the same settings.") if len(known) > 1 else None
    header = ("setting", *(label for label, _ in known))
    rows = [[name, *(text(settings.get(name)) for _, settings in known)] for name in differing]
    content = parts.table("Settings that differ", header, rows, left=header)
    return parts.section("Settings that differ", parts.card(content))


def _notes(records: Sequence[RunRecord], labels: Sequence[str]) -> Markup | None:
    notes = [
        f"{label}: {note}"
        for label, record in zip(labels, records, strict=True)
        for note in (*record.notes, *record.summary["warnings"])
    ]
    found = parts.notes_of(notes)
    return parts.section("What is missing", found) if found else None


def _commands(records: Sequence[RunRecord], labels: Sequence[str]) -> Markup | None:
    shown = [
        parts.details(label, parts.code(for_people(submit_command(record.spec))))
        for label, record in zip(labels, records, strict=True)
        if record.spec
    ]
    return parts.section("Reproduce them", parts.card(*shown)) if shown else None
