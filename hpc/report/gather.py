"""Reads what the page and the CSV tables of a run show; times are seconds since the epoch. Runs on the login node."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from hpc.core import ledger
from hpc.core.attempts import attempts_of
from hpc.core.errors import UserError
from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir
from hpc.core.text import csv_cell, csv_text
from hpc.spec import RunSpec
from hpc.status.downtime import PARTS
from hpc.status.run_view import TERMINAL, Summary

TRAIN = ("step", "epoch", "loss", "lr", "images_per_second", "world_size", "train_seconds", "attempt", "time")
EVALUATIONS = ("step", "epoch", "split", "loss", "accuracy", "correct", "total", "corrupt", "attempt", "time")
ATTEMPTS = (
    "attempt", "job_id", "nodes", "started", "ended", "seconds", "cause", "first_step", "last_step", "detail",
)  # fmt: skip
INTERRUPTIONS = (
    *("number", "attempt", "cause", "failed_at", "recorded_at", "step", "node", "rank", "steps_lost"),
    *(f"{part}_seconds" for part in (*PARTS, "total")),
    "detail",
)
CLASSES = ("class", "images", "correct", "accuracy", "most_often_confused_with", "confused_images")
_FILES = {
    "train.csv": "train", "eval.csv": "evaluations", "attempts.csv": "attempts",
    "interruptions.csv": "interruptions", "classes.csv": "classes",
}  # fmt: skip
_TEXT = {"split", "job_id", "nodes", "cause", "detail", "node", "class", "most_often_confused_with"}
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, read. Tables have the columns above, whatever the files lack."""

    run: RunDir
    summary: Summary
    spec: RunSpec | None
    train: pd.DataFrame
    evaluations: pd.DataFrame
    attempts: pd.DataFrame
    interruptions: pd.DataFrame
    classes: pd.DataFrame
    confusion: pd.DataFrame | None
    """Number of images by true class (rows) and predicted class (columns)."""
    samples: Sequence[dict[str, Any]]
    trained_from: float | None
    """When the first steps began."""
    last_event: float | None
    notes: list[str]
    """What is missing or damaged, in sentences."""

    @property
    def best_validation(self) -> float:
        """The best validation accuracy; NaN before the first."""
        return float(self.evaluations[self.evaluations["split"] == "val"]["accuracy"].max())

    @property
    def images_per_second(self) -> float:
        """The median throughput; NaN before the first logged step."""
        return float(self.train["images_per_second"].median())

    def wall_seconds(self, now: float) -> float | None:
        """From the start of the first attempt to the end of the last one, or to now."""
        if self.attempts.empty:
            return None
        ended = self.attempts["ended"].iloc[-1]
        if pd.isna(ended):
            ended = self.last_event or now if self.summary["state"] in TERMINAL else now
        return float(ended - self.attempts["started"].iloc[0])


def gather(run: RunDir, summary: Summary) -> RunRecord:
    """Read a run. A missing or damaged file is no error, but a note."""
    notes = list[str]()
    spec = _try(notes, run.spec, lambda path: RunSpec.load(RunDir(path.parent)))
    train = _lines(notes, run.train_metrics, TRAIN)
    evaluations = _lines(notes, run.eval_metrics, EVALUATIONS)
    for path in sorted(run.events.glob("*.jsonl")):
        _count_damaged(notes, path)
    _try(notes, run.final_result, lambda path: json.loads(path.read_bytes()))
    confusion = _try(notes, run.confusion, read_confusion)
    samples = _try(notes, run.samples, read_samples) or []
    events = ledger.read(run.events)
    starts = [attempt.training_started for attempt in attempts_of(events)]
    notes += missing(summary, spec, has_metrics=not train.empty, has_test=confusion is not None, samples=len(samples))
    attempts = [
        {
            **attempt,
            "nodes": " ".join(dict.fromkeys(attempt["members"])),
            "seconds": None if attempt["ended"] is None else attempt["ended"] - attempt["started"],
        }
        for attempt in summary["attempts"]
    ]
    interruptions = [
        {**one, **{f"{part}_seconds": seconds for part, seconds in one["seconds"].items()}, "number": number}
        for number, one in enumerate(summary["interruptions"], 1)
    ]
    return RunRecord(
        run=run,
        summary=summary,
        spec=spec,
        train=train,
        evaluations=evaluations,
        attempts=_table(attempts, ATTEMPTS),
        interruptions=_table(interruptions, INTERRUPTIONS),
        classes=classes_table(confusion),
        confusion=confusion,
        samples=samples,
        trained_from=next((start for start in starts if start is not None), None),
        last_event=events[-1].get("time") if events else None,
        notes=notes,
    )


def _try(notes: list[str], path: Path, read: Callable[[Path], Read]) -> Read | None:
    """Read a file; None if it does not exist or, with a note, is damaged."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, UserError) as error:
        notes.append(f"{path.parent.name}/{path.name} cannot be read: {' '.join(str(error).split())}.")
        return None


def _lines(notes: list[str], path: Path, columns: Sequence[str]) -> pd.DataFrame:
    _count_damaged(notes, path)
    found = _table(list(read_json_lines(path)), columns)
    return found[found["step"].notna()].reset_index(drop=True)


def _count_damaged(notes: list[str], path: Path) -> None:
    total = sum(bool(line.strip()) for line in path.read_bytes().splitlines()) if path.exists() else 0
    damaged = total - sum(1 for _ in read_json_lines(path))
    if damaged:
        notes.append(f"{path.parent.name}/{path.name}: {damaged} of {total} lines are damaged and left out.")


def _table(rows: Sequence[dict[str, Any]] | pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """A table of exactly these columns; all but those of text are numbers."""
    table = pd.DataFrame(rows).reindex(columns=list(columns))
    for column in columns:
        values = table[column]
        table[column] = values.astype("string") if column in _TEXT else pd.to_numeric(values, errors="coerce")
    return table


def missing(summary: Summary, spec: RunSpec | None, *, has_metrics: bool, has_test: bool, samples: int) -> list[str]:
    """What a page cannot show, and why, in sentences."""
    script, complete = spec is not None and spec.train is None, summary["state"] == "completed"
    over = summary["state"] in TERMINAL
    notes = (
        (not summary["attempts"], "No attempt has started."),
        (
            not has_metrics and script,
            "Custom script: log metrics to $TORCHRELAY_RUN_DIR/metrics/train.jsonl to see curves here.",
        ),
        (not has_metrics and not script, "No metrics: the first are logged after --log-every steps."),
        (not script and not over, "No test result yet: the test runs at the end of the training."),
        (not script and over and not complete, "No test result: the training did not finish."),
        (
            not script and complete and not has_test,
            "No confusion matrix: the data set has no test split, or final/confusion.csv is lost.",
        ),
        (has_test and not samples, "No sample predictions in final/."),
    )
    return [sentence for applies, sentence in notes if applies]


def read_confusion(path: Path) -> pd.DataFrame:
    """The confusion matrix; a ValueError if it is damaged."""
    # A class may be called NA, or have a number for a name.
    cells = pd.read_csv(path, header=None, dtype=str, keep_default_na=False)
    names = [csv_text(cell) for cell in cells.iloc[1:, 0]]
    if names != [csv_text(cell) for cell in cells.iloc[0, 1:]] or not names:
        raise ValueError("its rows and columns differ")
    return pd.DataFrame(cells.iloc[1:, 1:].to_numpy().astype("int64"), index=names, columns=names)


def classes_table(confusion: pd.DataFrame | None) -> pd.DataFrame:
    """For each class: its images, how many were predicted correctly, and the most frequent wrong prediction."""
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
    """The sample predictions; a ValueError if they are damaged, a KeyError if they are of another version."""
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


def csv_tables(records: Sequence[RunRecord]) -> dict[str, pd.DataFrame]:
    """The tables beside the page, by file name. Each has the run's name in front, and exists even without rows."""
    found = dict[str, pd.DataFrame]()
    for file, attribute in _FILES.items():
        tables = [getattr(record, attribute) for record in records]
        named = [table.assign(run=label) for label, table in zip(labels_of(records), tables, strict=True)]
        joined = pd.concat([table for table in named if not table.empty] or named[:1], ignore_index=True)
        # Steps are whole numbers, also where one is unknown.
        found[file] = joined[["run", *tables[0].columns]].convert_dtypes()
        for column in _TEXT.union({"run"}).intersection(found[file].columns):
            found[file][column] = found[file][column].map(csv_cell)
    return found


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """Each run's name, or its directory where two runs have the same name."""
    names = [record.run.name for record in records]
    return [
        name if names.count(name) == 1 else str(record.run.path) for name, record in zip(names, records, strict=True)
    ]
