"""Reads a run's data for the page and the CSV tables. Times are seconds since the epoch. Runs on the login node."""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from hpc.base.errors import UserError
from hpc.base.files import numbered_json_lines
from hpc.base.program import values_of
from hpc.base.text import csv_cell, csv_text
from hpc.programs.kinds import EvaluationTask, program_of_run
from hpc.run.events.downtime import PARTS, interruptions_of
from hpc.run.events.history import History
from hpc.run.events.timeline import Period, periods_of
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.status.summary import TERMINAL, Summary

TRAIN = ("step", "epoch", "loss", "lr", "images_per_second", "world_size", "train_seconds", "attempt", "time")
EVALUATIONS = (
    *("step", "epoch", "split", "loss", "accuracy", "top5_accuracy", "correct", "total", "corrupt", "attempt", "time"),
)
OTHER_METRICS = ("step", "epoch", "attempt", "time")
ATTEMPTS = (
    "attempt", "job_id", "nodes", "started", "ended", "seconds", "cause", "first_step", "last_step", "detail",
)  # fmt: skip
INTERRUPTIONS = (
    *("number", "attempt", "cause", "failed_at", "recorded_at", "step", "node", "rank", "steps_lost"),
    "steps_lost_at_most",
    *(f"{part}_seconds" for part in (*PARTS, "total")),
    "detail",
)
CLASSES = ("class", "images", "correct", "accuracy", "most_often_confused_with", "confused_images")
_FILES = {
    "train.csv": "train", "eval.csv": "evaluations", "attempts.csv": "attempts",
    "interruptions.csv": "interruptions", "classes.csv": "classes",
}  # fmt: skip
_TEXT = {"split", "job_id", "nodes", "cause", "detail", "node", "class", "most_often_confused_with"}
# The number of rows to read or write at a time, which limits the memory.
_PART_ROWS = 2000
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The data of one run. Tables have the columns that this module lists, even if the files lack them."""

    run: RunDir
    summary: Summary
    spec: RunSpec | None
    train: pd.DataFrame
    evaluations: pd.DataFrame
    other_metrics: Mapping[str, pd.DataFrame]
    """The tables of the other files in `metrics/`, by name."""
    attempts: pd.DataFrame
    interruptions: pd.DataFrame
    classes: pd.DataFrame
    confusion: pd.DataFrame | None
    """Number of images by true class (rows) and predicted class (columns). None if the file is missing or damaged."""
    samples: Sequence[dict[str, Any]]
    history: History
    task: EvaluationTask | None
    """The task of an evaluation; None for other runs."""
    revision: str | None
    """Git revision of the code. None if unknown."""
    notes: list[str]
    """Sentences about missing or damaged files."""

    @property
    def best_validation(self) -> float:
        """The best validation accuracy; NaN before the first validation."""
        return float(self.evaluations[self.evaluations["split"] == "val"]["accuracy"].max())

    @property
    def images_per_second(self) -> float:
        """The median throughput; NaN before the first logged step."""
        return float(self.train["images_per_second"].median())

    @property
    def last_logged(self) -> dict[str, Any]:
        """The last line of the training's metrics, without unknown values; an empty dict before the first line."""
        return {} if self.train.empty else dict(self.train.iloc[-1].dropna())

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended for good."""
        return self.summary.state in TERMINAL

    def ended(self, now: float) -> float:
        """Return the time at which the run ended, or `now` if the run goes on."""
        ended = None if self.attempts.empty else self.attempts["ended"].iloc[-1]
        if ended is not None and not pd.isna(ended) and self.has_ended:
            return float(ended)
        return self.history.events[-1].time if self.has_ended and self.history.events else now

    @property
    def began(self) -> float | None:
        """The time at which the first attempt started; None before the first attempt."""
        return None if self.attempts.empty else float(self.attempts["started"].iloc[0])

    @property
    def steps_per_epoch(self) -> float | None:
        """The number of steps in an epoch; None for a user's script, and before the training has started."""
        total = self.summary.total_steps
        epochs = values_of(program_of_run(self.spec)).get("epochs") if self.spec else None
        return total / epochs if total and epochs else None

    def is_fork_of(self, other: "RunRecord") -> bool:
        """Return whether the run is a fork of `other`. A fork has copies of the metrics of `other`, as attempt 0."""
        begin = self.spec.forked_from if self.spec else None
        return begin is not None and Path(begin).is_relative_to(other.run.checkpoints)

    def periods(self, now: float) -> list[Period]:
        """Return the periods of the run until its end or `now`."""
        own_script = self.spec is not None and not self.spec.program.reports_steps
        return periods_of(self.history, interruptions_of(self.history), self.ended(now), own_script=own_script)


def gather(run: RunDir, summary: Summary) -> RunRecord:
    """Return the data of a run. A missing or damaged file adds a note, and raises no error."""
    notes = list[str]()
    # The note about a damaged spec is dropped, because the summary reports the damage, too.
    spec = _try([], run.spec, lambda path: RunSpec.load(RunDir(path.parent)))
    train = _lines(notes, run.train_metrics, TRAIN)
    evaluations = _lines(notes, run.eval_metrics, EVALUATIONS)
    notes += summary.damaged
    confusion = _try(notes, run.confusion, read_confusion)
    samples = _try(notes, run.samples, read_samples) or []
    history = History.load(run)
    revision = _try(notes, run.revision, lambda path: path.read_text().strip())
    other = {
        path.stem: _lines(notes, path, OTHER_METRICS)
        for path in sorted(run.train_metrics.parent.glob("*.jsonl"))
        if path not in {run.train_metrics, run.eval_metrics}
    }
    task = _try(notes, run.model, EvaluationTask.load)
    script, evaluates = spec is not None and bool(spec.script), task is not None
    has_metrics, has_test = not train.empty, confusion is not None
    notes += missing(
        summary, script=script, evaluates=evaluates, has_metrics=has_metrics, has_test=has_test, samples=len(samples)
    )
    attempts = [
        {
            **asdict(attempt),
            "nodes": " ".join(dict.fromkeys(attempt.members)),
            "seconds": None if attempt.ended is None else attempt.ended - attempt.started,
        }
        for attempt in summary.attempts
    ]
    interruptions = [
        {**vars(one), **{f"{part}_seconds": seconds for part, seconds in one.seconds.items()}, "number": number}
        for number, one in enumerate(summary.interruptions, 1)
    ]
    return RunRecord(
        run=run,
        summary=summary,
        spec=spec,
        train=train,
        evaluations=evaluations,
        other_metrics=other,
        attempts=_table(attempts, ATTEMPTS),
        interruptions=_table(interruptions, INTERRUPTIONS),
        classes=classes_table(confusion),
        confusion=confusion,
        samples=samples,
        history=history,
        task=task,
        revision=revision,
        notes=notes,
    )


def _try(notes: list[str], path: Path, read: Callable[[Path], Read]) -> Read | None:
    """Return what `read` returns for a file. If the file is missing, return None; if it is damaged, also add a note."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, UserError) as error:
        notes.append(f"{path.parent.name}/{path.name} cannot be read: {' '.join(str(error).split())}.")
        return None


def _lines(notes: list[str], path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read `columns` and all columns of numbers from a file of metrics. Keep only the newest row of each step."""
    found = _read_lines(notes, path, columns)
    steps = found["step"]
    finite = np.isfinite(steps)
    # A script that restarts from a checkpoint writes steps again: drop what it wrote about them before.
    kept = finite & (steps <= np.minimum.accumulate(np.where(finite, steps, np.inf)[::-1])[::-1])
    if (np.diff(steps[kept]) == 0).any():
        keys = pd.DataFrame({name: found[name] for name in ("step", "split") if name in found})
        kept[kept] = ~keys[kept].duplicated(keep="last").to_numpy()
    # Columns are filtered one by one: filtering the whole table at once would take twice the memory.
    return pd.DataFrame({name: found.pop(name)[kept] for name in list(found)}, copy=False)


def _read_lines(notes: list[str], path: Path, columns: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a file of metrics.

    A long run has millions of lines, so only some of them are Python objects at a time.
    """
    texts = {name: list[Any]() for name in columns if name in _TEXT}
    numbers = {name: array("d") for name in columns if name not in _TEXT}
    count, records = 0, _records(notes, path)
    while lines := list(islice(records, _PART_ROWS)):
        for name in (name for line in lines for name, value in line.items() if type(value) in {int, float}):
            if name not in texts and name not in numbers:
                numbers[name] = array("d", [np.nan]) * count
        for name, column in numbers.items():
            values = pd.to_numeric(pd.Series([line.get(name) for line in lines]), errors="coerce")
            column.frombytes(values.to_numpy("float64").tobytes())
        for name, cells in texts.items():
            cells += [line.get(name) for line in lines]
        count += len(lines)
    return {
        name: pd.array(texts[name], dtype="string") if name in texts else np.frombuffer(numbers[name])
        for name in dict.fromkeys([*columns, *numbers])
    }


def _records(notes: list[str], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the undamaged records of a file. At the end, add a note with the number of damaged lines."""
    total = damaged = 0
    for _, record in numbered_json_lines(path):
        total += 1
        if record is None:
            damaged += 1
        else:
            yield record
    if damaged:
        notes.append(f"{path.parent.name}/{path.name}: {damaged} of {total} lines are damaged and left out.")


def _table(rows: Sequence[dict[str, Any]] | pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return a table of exactly these columns; all columns except those in `_TEXT` are numbers."""
    table = pd.DataFrame(rows).reindex(columns=list(columns))
    for column in columns:
        values = table[column]
        table[column] = values.astype("string") if column in _TEXT else pd.to_numeric(values, errors="coerce")
    return table


def missing(
    summary: Summary, *, script: bool, evaluates: bool, has_metrics: bool, has_test: bool, samples: int
) -> list[str]:
    """Return sentences about what a page cannot show, and why."""
    complete = summary.state == "completed"
    over = summary.state in TERMINAL
    notes = (
        (not summary.attempts, "No attempt has started."),
        (
            not has_metrics and script,
            "For curves, log metrics to $TORCHRELAY_RUN_DIR/metrics/train.jsonl (docs/reference/metrics.md).",
        ),
        (not has_metrics and not script and not evaluates, "No metrics: the first are logged after --log-every steps."),
        (evaluates and not complete, "No result: the evaluation has not ended."),
        (not script and not evaluates and not over, "No test result yet: the test runs at the end of the training."),
        (not script and not evaluates and over and not complete, "No test result: the training did not finish."),
        (
            not script and complete and not has_test,
            "No confusion matrix: no test split, more than 2,000 classes, or final/confusion.csv is lost.",
        ),
        (has_test and not samples, "No sample predictions in final/."),
    )
    return [sentence for applies, sentence in notes if applies]


def read_confusion(path: Path) -> pd.DataFrame:
    """Return the confusion matrix. Raises ValueError if it is damaged."""
    # All cells are read as text, because the name of a class may be NA or a number.
    cells = pd.read_csv(path, header=None, dtype=str, keep_default_na=False)
    names = [csv_text(cell) for cell in cells.iloc[1:, 0]]
    if names != [csv_text(cell) for cell in cells.iloc[0, 1:]] or not names:
        raise ValueError("its rows and columns differ")
    return pd.DataFrame(cells.iloc[1:, 1:].to_numpy().astype("int64"), index=names, columns=names)


def classes_table(confusion: pd.DataFrame | None) -> pd.DataFrame:
    """Return a table of the classes: images, correct predictions, accuracy, and the most frequent wrong prediction."""
    if confusion is None:
        return _table([], CLASSES)
    counts = confusion.to_numpy()
    images, correct = pd.Series(counts.sum(axis=1)), pd.Series(counts.diagonal())
    wrong = counts - np.diag(correct)
    confused = wrong.max(axis=1)
    columns = {
        "class": confusion.index,
        "images": images,
        "correct": correct,
        "accuracy": correct / images,
        "most_often_confused_with": confusion.columns[wrong.argmax(axis=1)].where(confused > 0),
        "confused_images": confused,
    }
    return _table(pd.DataFrame(columns), CLASSES)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the sample predictions. Raises ValueError if they are damaged, KeyError if another version wrote them."""
    found: list[dict[str, Any]] = [
        {
            **{key: str(sample[key]) for key in ("kind", "name", "true", "predicted", "png")},
            "probability": float(sample["probability"]),
        }
        for sample in json.loads(path.read_bytes())
    ]
    if not all(_BASE64.fullmatch(sample["png"]) for sample in found):
        raise ValueError("an image is damaged")
    return found


def csv_tables(records: Sequence[RunRecord]) -> dict[str, Iterator[str]]:
    """Return the CSV tables that belong to the page: the text of each, in parts, by its file name.

    The first column is the run's name. A table exists even without rows.
    """
    found = {file: _csv(records, [getattr(one, attribute) for one in records]) for file, attribute in _FILES.items()}
    for name in sorted({name for record in records for name in record.other_metrics}):
        tables = [record.other_metrics.get(name, _table([], OTHER_METRICS)) for record in records]
        found[f"metrics-{name}.csv"] = _csv(records, tables)
    return found


def _csv(records: Sequence[RunRecord], tables: Sequence[pd.DataFrame]) -> Iterator[str]:
    columns = list(dict.fromkeys(["run", *(column for table in tables for column in table.columns)]))
    yield pd.DataFrame(columns=[csv_cell(column) for column in columns]).to_csv(index=False)
    for label, table in zip(labels_of(records), tables, strict=True):
        # Steps stay whole numbers even if one is unknown.
        types = {name: column.convert_dtypes().dtype for name, column in table.items()}
        for first in range(0, len(table), _PART_ROWS):
            part = table.iloc[first : first + _PART_ROWS].astype(types).assign(run=label).reindex(columns=columns)
            for name, column in part.items():
                if not pd.api.types.is_numeric_dtype(column):
                    part[name] = column.map(csv_cell)
            yield part.to_csv(index=False, header=False)


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's name, or its directory if several runs have the same name."""
    names = [record.run.name for record in records]
    return [
        name if names.count(name) == 1 else str(record.run.path) for name, record in zip(names, records, strict=True)
    ]
