"""Prepares the data that the templates need for the page of a run or of a comparison. Pure; runs on the login node."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hpc.report import formats
from hpc.report.bokeh_figures import plots_of
from hpc.report.colors import line_style
from hpc.report.command import flat_settings, settings_with_defaults, shell_text, submit_command
from hpc.report.formats import known
from hpc.report.gather import RunRecord, labels_of
from hpc.report.origin import cost, how_to_get_the_code, provenance
from hpc.report.rendering import render
from hpc.run.events.downtime import PARTS
from hpc.run.spec import RunSpec
from hpc.status.cells import is_on_cpu
from training.config.dataset_layout import title_of
from training.config.evaluation_task import EvaluationTask
from training.config.train_config import highest_learning_rate

# Nobody reads a confusion matrix of more classes: a thousand classes would make a million cells.
_MAX_CLASSES, _MAX_LISTED = 30, 20
# More setting columns would not fit next to the results.
_MOST_SETTING_COLUMNS = 6
_RECOVERY = {
    "notice": "until the failure was noticed and all processes had ended",
    "release": "until the requeue or the new job",
    "start": "in the queue, until the job started",
    "stage": "staging the data",
    "rendezvous": "until all ranks were connected",
    "restore": "reading the checkpoint",
    "first_step": "until the first step was done",
}
RELOAD_SECONDS = 30
# Color and meaning of the marks in the figures.
_MARKS = (
    ("failure", "a failure, with the steps or the time that it cost"),
    ("outside", "a preemption or time limit"),
    ("queue", "in the queue"),
)
# Color of each kind of period (hpc.run.events.timeline).
_PERIODS = {"queue": "queue", "startup": "s1", "training": "s3", "recovery": "failure"}
_RECOVERY_COLORS = {part: f"s{number}" for number, part in enumerate(PARTS, 1)} | {"start": "queue"}


def run_page(record: RunRecord, tables: Sequence[str], now: float) -> str:
    """Return the HTML of a run's page. `tables` names the CSV files; `now` is in seconds since the epoch."""
    spec = record.spec
    return render(
        "run.html",
        record=record,
        tables=tables,
        now=now,
        seconds=None if record.began is None else record.ended(now) - record.began,
        headline=_headline(spec, on_cpu=is_on_cpu(record.summary)) if spec else (),
        causes=[f"{cost.count} {formats.cause(name)}" for name, cost in record.summary.recovery.items()],
        reload_seconds=None if record.has_ended else RELOAD_SECONDS,
        provenance=provenance(record),
        cost=cost(record, now),
        # An evaluation would have curves of a single point.
        plots=plots_of([] if spec and spec.evaluation else [record], now),
        evaluation=_evaluation(record),
        several_attempts=len(record.attempts) > 1,
        mark_legend=_MARKS,
        **_timeline(record, now),
        lost_by_cause=_lost_time(_by_cause(record.interruptions)),
        recovery_legend=_recovery_legend,
        interruptions=_interruption_rows(record),
        attempts=record.attempts.to_dict("records"),
        command=shell_text(submit_command(spec)) if spec else "",
        origin=how_to_get_the_code(record),
        settings=[pair for pair in flat_settings(spec).items() if pair[1]] if spec else (),
        **_test(record),
    )


def comparison_page(
    records: Sequence[RunRecord], links: Sequence[str | None], tables: Sequence[str], now: float
) -> str:
    """Return the HTML of the page that compares runs. `links` has the path of each run's own page; None without one."""
    labelled = list(zip(labels_of(records), records, strict=True))
    differing = _differing_settings({label: record.spec for label, record in labelled if record.spec})
    few = len(differing) <= _MOST_SETTING_COLUMNS
    return render(
        "comparison.html",
        tables=tables,
        now=now,
        reload_seconds=None if all(record.has_ended for record in records) else RELOAD_SECONDS,
        runs=_runs(labelled, links, now, differing),
        # Many settings become rows of a separate table.
        setting_columns=[(name, f"setting {name}", "wrapped") for name in differing if few],
        run_columns=[(label, label, "wrapped") for label, _ in labelled],
        settings=[]
        if few
        else [
            {**{label: of.get(label, "") for label, _ in labelled}, "setting": name} for name, of in differing.items()
        ],
        plots=plots_of(records, now),
        lost_by_run=_lost_time({label: record.interruptions for label, record in labelled}),
        lost_by_cause=_lost_time(_by_cause(pd.concat([record.interruptions for record in records]))),
        recovery_legend=_recovery_legend,
        **_compared_classes(labelled),
        remarks=[f"{label}: {note}" for label, one in labelled for note in (*one.notes, *one.summary.warnings)],
    )


def _headline(spec: RunSpec, *, on_cpu: bool) -> list[str]:
    """Return the parts of the line below the title: what ran, its main settings, and its nodes and GPUs."""
    nodes, resources = spec.resources.nodes, spec.resources
    count, kind = resources.gpus_per_node.count, resources.gpus_per_node.kind
    gpus = formats.plural(count, "rank") + " on CPUs" if on_cpu else formats.plural(count, f"{kind or ''} GPU".strip())
    where = f"{nodes} node{'s' * (nodes.most > 1)}" + (f" × {gpus}" if count else " without GPUs")  # noqa: RUF001 - times
    if spec.training is None:
        return [" ".join(spec.script), where]
    train = spec.training.train
    if spec.evaluation is not None:
        return [evaluated(spec.evaluation), f"on {train.data}", where]
    sizes = f"{train.epochs} epochs, batch size {train.batch_size:,}"
    optimizer = f"{train.optimizer}, lr {highest_learning_rate(train):.3g}"
    data = title_of(Path(train.data)) or train.data
    return [f"{train.model} on {data}", sizes, optimizer, f"seed {train.seed}", where]


def _evaluation(record: RunRecord) -> dict[str, Any] | None:
    """Return the result of an evaluation; None if the run is a training, or has no result yet."""
    if record.spec is None or record.spec.evaluation is None or record.evaluations.empty:
        return None
    return dict(record.evaluations.iloc[-1])


def evaluated(task: EvaluationTask) -> str:
    """Return a title such as `Evaluation of best model of run-1, after step 500`."""
    which = f"{task.checkpoint} model of " if task.checkpoint in {"best", "last"} else ""
    after = f", after step {task.step:,}" if task.step is not None else ""
    return f"Evaluation of {which}{task.source}{after}"


def _test_about(record: RunRecord, images: int, classes: int) -> str:
    """Return a sentence that names the tested model and images."""
    counts = f"{formats.number(images)} images"
    of_classes = f"of {formats.number(classes)} classes"
    task = record.spec.evaluation if record.spec else None
    if task is None:
        return f"The final model on all {counts} of the test set, {of_classes}."
    split = "" if record.evaluations.empty else record.evaluations["split"].iloc[-1]
    part = {"test": "the test set", "val": "the validation set"}.get(split, "the data")
    return f"{evaluated(task)}, on all {counts} of {part}, {of_classes}."


def _interruption_rows(record: RunRecord) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = record.interruptions.to_dict("records")
    for row in rows:
        rank = [f"rank {row['rank']:.0f}"] if known(row["rank"]) else []
        node = [row["node"]] if known(row["node"]) else []
        row["at"] = row["failed_at"] if known(row["failed_at"]) else row["recorded_at"]
        at_most = row["steps_lost_at_most"]
        row["steps"] = (
            f"\N{LESS-THAN OR EQUAL TO} {at_most:.0f}" if known(at_most) else formats.number(row["steps_lost"])
        )
        row["where"] = ", ".join([*rank, *node])
    return rows


def _timeline(record: RunRecord, now: float) -> dict[str, Any]:
    """Return a run's periods in their order, and the sum of each kind, both as name, seconds and color."""
    parts, spent = list[tuple[str, float, str]](), dict.fromkeys(_PERIODS, 0.0)
    for period in record.periods(now) if record.summary.attempts else ():
        spent[period.kind] += period.seconds
        attempt = sum(one.started < period.ended for one in record.summary.attempts)
        name = f"attempt {attempt}" if period.kind == "training" else period.kind
        after = f" after interruption #{period.interruption}" if period.interruption else ""
        parts.append((name + after, period.seconds, _PERIODS[period.kind]))
    return {"timeline": parts, "time_spent": [(kind, spent[kind], color) for kind, color in _PERIODS.items()]}


def _by_cause(interruptions: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {formats.cause(name): rows for name, rows in interruptions.groupby("cause", sort=False)}


def _lost_time(groups: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Return the time and the steps that each group of interruptions cost, with the time of each part of a recovery."""
    return [
        {
            "name": name,
            "count": len(rows),
            "seconds": float(rows["total_seconds"].sum()),
            "unknown": int(rows["total_seconds"].isna().sum()),
            "steps": int(rows["steps_lost"].sum()) if rows["steps_lost"].notna().any() else None,
            "parts": [(part, float(rows[f"{part}_seconds"].sum()), _RECOVERY_COLORS[part]) for part in PARTS],
            "measured": sum(float(rows[f"{part}_seconds"].sum()) for part in PARTS),
        }
        for name, rows in groups.items()
        if len(rows)
    ]


def _recovery_legend(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the color, name and meaning of each part of a recovery that took time."""
    used = {part for group in groups for part, seconds, _ in group["parts"] if seconds > 0}
    return [(_RECOVERY_COLORS[part], part.replace("_", " "), _RECOVERY[part]) for part in PARTS if part in used]


def _test(record: RunRecord) -> dict[str, Any]:
    """Return the classes, worst first, and the confusion matrix or, for many classes, the most confused pairs."""
    classes, confusion = record.classes, record.confusion
    few = len(classes) <= _MAX_CLASSES
    rows = classes.sort_values("accuracy").head(len(classes) if few else _MAX_LISTED).to_dict("records")
    for row in rows:
        images = row["confused_images"]
        row["confused"] = f"{row['most_often_confused_with']} ({formats.number(images)})" if images else None
    shown = confusion if few and confusion is not None else pd.DataFrame()
    pairs = None
    if not few and confusion is not None:
        pairs = [
            {"true": true, "predicted": predicted, "images": int(images)}
            for true, counts in confusion.iterrows()
            for predicted, images in counts.items()
            if true != predicted and images
        ]
        pairs = sorted(pairs, key=lambda pair: -pair["images"])[:_MAX_LISTED]
    return {
        "classes": rows,
        "class_count": len(classes),
        "test_about": _test_about(record, classes["images"].sum(), len(classes)),
        "matrix": {"names": list(shown.index), "counts": shown.to_numpy().tolist()},
        "pairs": pairs,
    }


def _runs(
    labelled: Sequence[tuple[str, RunRecord]],
    links: Sequence[str | None],
    now: float,
    differing: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    compared: dict[str, list[float | None]] = {
        "test_accuracy": [record.summary.test_accuracy for _, record in labelled],
        "best_validation": [record.best_validation for _, record in labelled],
    }
    best = {
        name: max((value for value in values if value is not None and known(value)), default=None)
        for name, values in compared.items()
    }
    return [
        {
            **record.summary.document(),
            "run": label,
            "link": link,
            **dict(zip(("color", "dashes"), line_style(number), strict=True)),
            "best": best,
            "best_validation": record.best_validation,
            "images_per_second": record.images_per_second,
            "interruptions": len(record.interruptions),
            "seconds": None if record.began is None else record.ended(now) - record.began,
            **{f"setting {name}": values.get(label, "") for name, values in differing.items()},
        }
        for number, ((label, record), link) in enumerate(zip(labelled, links, strict=True))
    ]


def _compared_classes(labelled: Sequence[tuple[str, RunRecord]]) -> dict[str, Any]:
    """Return the accuracy of each class in each tested run; no rows unless several runs share the same few classes."""
    tested = [(label, record.classes) for label, record in labelled if len(record.classes)]
    names = {tuple(classes["class"]) for _, classes in tested}
    if len(names) != 1 or len(tested) < 2 or len(tested[0][1]) > _MAX_CLASSES:
        return {"classes": [], "class_columns": []}
    accuracies = zip(tested[0][1]["class"], *(classes["accuracy"] for _, classes in tested), strict=True)
    return {
        "classes": [
            {"class": name, "best": dict.fromkeys(range(len(row)), max(row)), **dict(enumerate(row))}
            for name, *row in accuracies
        ],
        "class_columns": [
            ("class", "class", "text"),
            *((label, number, "percent") for number, (label, _) in enumerate(tested)),
        ],
    }


def _differing_settings(specs: Mapping[str, RunSpec]) -> dict[str, dict[str, str]]:
    """Return the settings in which the runs differ, with the value in each run."""
    flat = {label: settings_with_defaults(spec) for label, spec in specs.items()}
    names = dict.fromkeys(name for settings in flat.values() for name in settings)
    values = {name: {label: settings.get(name, "") for label, settings in flat.items()} for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs.values())) > 1}
