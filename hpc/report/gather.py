"""Reads a run's data for the page and the CSV tables. Times are seconds since the epoch. Runs on the login node."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from hpc.base.errors import UserError
from hpc.base.files import json_lines, number_in
from hpc.base.program import plain
from hpc.base.text import csv_cell, csv_text, without_secrets, words_without_secrets
from hpc.programs.program_kinds import EvaluationTask, settings_of
from hpc.run.events.history import History
from hpc.run.events.interruptions import PARTS
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.status.summary import TERMINAL, Summary

Rows = Sequence[dict[str, Any]]

_METRICS = ("step", "epoch", "attempt", "time")
"""The columns that each table of metrics has, even if no line has such a number."""
_SPLIT = "split"
"""The only text in metrics: the part of the data, in `eval.jsonl`."""
ATTEMPTS = (
    "attempt", "job_id", "nodes", "started", "ended", "seconds", "cause", "first_step", "last_step", "detail",
)  # fmt: skip
INTERRUPTIONS = (
    *("number", "attempt", "cause", "failed_at", "recorded_at", "step", "node", "rank", "steps_lost"),
    "steps_lost_at_most",
    *(f"{part}_seconds" for part in (*PARTS, "total")),
    "detail",
)
# The number of rows to read or write at a time, which limits the memory.
_PART_ROWS = 2000
_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The data of one run."""

    run: RunDir
    summary: Summary
    spec: RunSpec | None
    """Without secrets, because people share reports."""
    settings: Mapping[str, Any]
    """The run's flags by name, and the command line of a script; empty if they cannot be read."""
    metrics: Mapping[str, pd.DataFrame]
    """The tables of the files in `metrics/`, by name; `train` and `eval` are always there."""
    attempts: Rows
    interruptions: Rows
    confusion: Rows
    """The classes of the test with the numbers of their images by predicted class; empty without a confusion matrix."""
    history: History
    task: EvaluationTask | None
    """The task of an evaluation; None for other runs."""
    revision: str | None
    """Git revision of the code. None if unknown."""
    notes: list[str]
    """Sentences about missing or damaged files."""

    @property
    def best_validation(self) -> float | None:
        """The best validation accuracy; None before the first validation."""
        table = self.metrics["eval"]
        return float(table[table[_SPLIT] == "val"]["accuracy"].max()) if "accuracy" in table else None

    @property
    def images_per_second(self) -> float | None:
        """The median throughput; None before the first logged step."""
        table = self.metrics["train"]
        return float(table["images_per_second"].median()) if "images_per_second" in table else None

    @property
    def seconds_lost(self) -> float | None:
        """The time that the interruptions cost, as far as it is known; None if it is not known of any."""
        costs = [one["total_seconds"] for one in self.interruptions if one["total_seconds"] is not None]
        return sum(costs) if costs else None

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended for good."""
        return self.summary.state in TERMINAL

    @property
    def steps_per_epoch(self) -> float | None:
        """The number of steps in an epoch; None for a program without a flag `epochs`, and before the first step."""
        total, epochs = self.summary.total_steps, self.settings.get("epochs")
        return total / epochs if total and epochs else None


def gather(run: RunDir, summary: Summary) -> RunRecord:
    """Return the data of a run. A missing or damaged file adds a note, and raises no error."""
    notes = list[str]()
    # The note about a damaged spec is dropped, because the summary reports the damage, too.
    spec = _try([], run.spec, lambda path: _shareable(RunSpec.load(RunDir(path.parent))))
    files = {path.stem: path for path in (run.train_metrics, run.eval_metrics)}
    files |= {path.stem: path for path in sorted(run.train_metrics.parent.glob("*.jsonl"))}
    metrics = {name: _metrics(notes, path) for name, path in files.items()}
    confusion = _try(notes, run.confusion, read_confusion) or []
    notes += summary.damaged
    record = RunRecord(
        run=run,
        summary=summary,
        spec=spec,
        settings=_settings(notes, spec) if spec else {},
        metrics=metrics,
        attempts=[
            {
                **asdict(attempt),
                "nodes": " ".join(dict.fromkeys(attempt.members)),
                "seconds": None if attempt.ended is None else attempt.ended - attempt.started,
            }
            for attempt in summary.attempts
        ],
        interruptions=[
            {**vars(one), **{f"{part}_seconds": seconds for part, seconds in one.seconds.items()}, "number": number}
            for number, one in enumerate(summary.interruptions, 1)
        ],
        confusion=confusion,
        history=History.load(run),
        task=_try(notes, run.model, EvaluationTask.load),
        revision=_try(notes, run.revision, lambda path: path.read_text().strip()),
        notes=notes,
    )
    notes += _missing(record)
    return record


def _try(notes: list[str], path: Path, read: Callable[[Path], _Read]) -> _Read | None:
    """Return what `read` returns for a file. If the file is missing, return None; if it is damaged, also add a note."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, UserError) as error:
        notes.append(f"{path.parent.name}/{path.name} cannot be read: {' '.join(str(error).split())}.")
        return None


def _shareable(spec: RunSpec) -> RunSpec:
    """Return a spec without the secrets in --setup and among the arguments of a script."""
    resources = replace(spec.resources, setup=tuple(map(without_secrets, spec.resources.setup)))
    program = replace(spec.program, argv=words_without_secrets(spec.script)) if spec.script else spec.program
    return replace(spec, resources=resources, program=program)


def _settings(notes: list[str], spec: RunSpec) -> dict[str, Any]:
    try:
        return plain({"script": " ".join(spec.script), **settings_of(spec)})
    except UserError as error:
        notes.append(f"The settings in spec.json are of another version of torchrelay: {error}.")
        return {}


def _metrics(notes: list[str], path: Path) -> pd.DataFrame:
    """Read the numbers in a file of metrics. Keep only the newest row of each step and split, and sort them by step."""
    columns = [*_METRICS, *([_SPLIT] if path.stem == "eval" else [])]
    parts, total, damaged = list[pd.DataFrame](), 0, 0
    lines = json_lines(path)
    # A long run has millions of lines, so only some of them are Python objects at a time.
    while some := list(islice(lines, _PART_ROWS)):
        rows = [_numbers(record) for record in some if record is not None]
        total, damaged = total + len(some), damaged + len(some) - len(rows)
        parts.append(pd.DataFrame(rows))
    if damaged:
        notes.append(f"{path.parent.name}/{path.name}: {damaged} of {total} lines are damaged and left out.")
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    parts.clear()
    for name in columns:
        if name not in table:
            table[name] = None if name == _SPLIT else np.nan
    keys = [name for name in ("step", _SPLIT) if name in table]
    is_dropped = table["step"].isna() | table.duplicated(keys, keep="last")
    splits = table[_SPLIT] if _SPLIT in table else pd.Series(0, table.index)
    for _, rows in table[["step", "attempt"]].groupby(splits, dropna=False):
        is_dropped[rows.index] |= _is_undone(rows)
    return table[~is_dropped].sort_values("step", kind="stable", ignore_index=True)


def _is_undone(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Return which rows are of steps that a later attempt, which began before them, does again.

    Steps need not ascend within an attempt: a script may test its best checkpoint last.
    """
    first_steps = rows.groupby("attempt")["step"].min()
    of_later_attempts = first_steps[::-1].cummin().shift()
    return rows["step"] >= rows["attempt"].map(of_later_attempts)


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in a line of metrics, and its split."""
    row: dict[str, Any] = {name: value for name in record if (value := number_in(record, name)) is not None}
    return row | ({_SPLIT: record[_SPLIT]} if isinstance(record.get(_SPLIT), str) else {})


def _missing(record: RunRecord) -> list[str]:
    """Return sentences about what a page cannot show, and why."""
    notes = [] if record.attempts else ["No attempt has started."]
    if record.spec and record.spec.script and record.metrics["train"].empty:
        notes.append("For curves, log metrics to $TORCHRELAY_RUN_DIR/metrics/train.jsonl (docs/reference/metrics.md).")
    if record.spec and record.spec.program.writes_result and record.summary.state != "completed":
        why = "the run did not finish" if record.has_ended else "it is written at the end of the run"
        notes.append(f"No result: {why}.")
    return notes


def read_confusion(path: Path) -> list[dict[str, Any]]:
    """Return the name and the `counts` of each row of a confusion matrix. Raises ValueError if it is damaged."""
    with path.open(encoding="utf-8", newline="") as file:
        (_, *header), *lines = csv.reader(file)
    if not header or [line[0] for line in lines] != header or any(len(line) != len(header) + 1 for line in lines):
        raise ValueError("its rows and columns differ")
    return [{"class": csv_text(name), "counts": [int(cell) for cell in counts]} for name, *counts in lines]


def csv_tables(records: Sequence[RunRecord]) -> dict[str, Iterator[str]]:
    """Return the CSV tables that belong to the page: the text of each, in parts, by its file name.

    The first column is the run's name. A table exists even without rows.
    """
    names = dict.fromkeys(name for record in records for name in record.metrics)
    tables = {
        f"{name}.csv" if name in {"train", "eval"} else f"metrics-{name}.csv": [
            record.metrics.get(name, pd.DataFrame()) for record in records
        ]
        for name in names
    }
    for name, columns in (("attempts", ATTEMPTS), ("interruptions", INTERRUPTIONS)):
        tables[f"{name}.csv"] = [pd.DataFrame(getattr(record, name), columns=list(columns)) for record in records]
    return {file: _csv(labels_of(records), of_runs) for file, of_runs in tables.items()}


def _csv(labels: Sequence[str], tables: Sequence[pd.DataFrame]) -> Iterator[str]:
    columns = list(dict.fromkeys(["run", *(column for table in tables for column in table)]))
    yield pd.DataFrame(columns=[csv_cell(column) for column in columns]).to_csv(index=False)
    for label, table in zip(labels, tables, strict=True):
        for first in range(0, len(table), _PART_ROWS):
            # Steps stay whole numbers even if one is unknown.
            part = table.iloc[first : first + _PART_ROWS].convert_dtypes().assign(run=label).reindex(columns=columns)
            for name in part.select_dtypes(exclude="number"):
                part[name] = part[name].map(csv_cell)
            yield part.to_csv(index=False, header=False)


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's name, or its directory if several runs have the same name."""
    names = [record.run.name for record in records]
    return [
        name if names.count(name) == 1 else str(record.run.path) for name, record in zip(names, records, strict=True)
    ]
