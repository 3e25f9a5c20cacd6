"""Reads everything of a run that its page shows, and notes what is missing or damaged. Runs on the login node."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from hpc.core import ledger
from hpc.core.attempts import attempts_of
from hpc.core.errors import UserError
from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir
from hpc.spec import RunSpec
from hpc.status.downtime import PARTS
from hpc.status.run_view import TERMINAL, Summary

TRAIN = (
    *("step", "epoch", "loss", "lr", "images_per_second"),
    *("world_size", "train_seconds", "attempt", "time"),
)
EVALUATIONS = ("step", "epoch", "split", "loss", "accuracy", "correct", "total", "corrupt", "attempt", "time")
ATTEMPTS = (
    *("attempt", "job_id", "nodes", "started", "ended", "seconds", "cause"),
    *("first_step", "last_step", "detail"),
)
INTERRUPTIONS = (
    *("number", "attempt", "cause", "failed_at", "noted", "step", "node", "rank", "steps_lost"),
    *(f"{part}_seconds" for part in (*PARTS, "total")),
    "detail",
)
CLASSES = ("class", "images", "correct", "accuracy", "mostly_taken_for", "taken_for_it")
_TEXT = {"split", "job_id", "nodes", "cause", "detail", "node", "class", "mostly_taken_for"}
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
    """Images by true class (rows) and by what they were taken for."""
    samples: Sequence[dict[str, Any]]
    trained_from: float | None
    """When the first steps began, in seconds since the epoch."""
    last_heard: float | None
    """When the last event happened."""
    notes: Sequence[str]
    """What is missing or damaged, in sentences."""


def gather(run: RunDir, summary: Summary) -> RunRecord:
    """Read a run. Nothing that is missing or damaged is an error: it is noted."""
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
    starts = [attempt.trained_from for attempt in attempts_of(events)]
    notes += missing(summary, spec, has_metrics=not train.empty, has_test=confusion is not None, samples=len(samples))
    return RunRecord(
        run=run,
        summary=summary,
        spec=spec,
        train=train,
        evaluations=evaluations,
        attempts=attempts_table(summary["attempts"]),
        interruptions=interruptions_table(summary["interruptions"]),
        classes=classes_table(confusion),
        confusion=confusion,
        samples=samples,
        trained_from=next((start for start in starts if start is not None), None),
        last_heard=events[-1].get("time") if events else None,
        notes=notes,
    )


def _try(notes: list[str], path: Path, read: Callable[[Path], Read]) -> Read | None:
    """What a file holds, or None if it is not there or, which is noted, damaged."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, UserError) as error:
        notes.append(f"{_short(path)} cannot be read: {' '.join(str(error).split())}.")
        return None


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _lines(notes: list[str], path: Path, columns: Sequence[str]) -> pd.DataFrame:
    _count_damaged(notes, path)
    found = _table(list(read_json_lines(path)), columns)
    return found[found["step"].notna()].reset_index(drop=True)


def _count_damaged(notes: list[str], path: Path) -> None:
    there = sum(bool(line.strip()) for line in path.read_bytes().splitlines()) if path.exists() else 0
    damaged = there - sum(1 for _ in read_json_lines(path))
    if damaged:
        notes.append(f"{_short(path)} has damaged lines, which are left out: {damaged} of {there}.")


def _table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """A table of exactly these columns, numbers but for those of text."""
    table = pd.DataFrame.from_records(records).reindex(columns=list(columns))
    for column in columns:
        kind = table[column].astype("string") if column in _TEXT else pd.to_numeric(table[column], errors="coerce")
        table[column] = kind
    return table


def missing(summary: Summary, spec: RunSpec | None, *, has_metrics: bool, has_test: bool, samples: int) -> list[str]:
    """What a page cannot show, and why, in sentences."""
    script, complete = spec is not None and spec.train is None, summary["state"] == "completed"
    over = summary["state"] in TERMINAL
    signs = (
        (not summary["attempts"], "No attempt has begun."),
        (not has_metrics and script, "A script of your own ran: only attempts and interruptions are known of it."),
        (not has_metrics and not script, "There are no metrics: the first ones come after --log-every steps."),
        (not script and not over, "The test comes at the end of the training: there is no result of it yet."),
        (not script and over and not complete, "There is no test result: the training did not come to its end."),
        (
            not script and complete and not has_test,
            "There is no confusion matrix: the data have no test set, or it is lost.",
        ),
        (has_test and not samples, "There are no sample predictions: final/ holds none."),
    )
    return [sentence for seen, sentence in signs if seen]


def attempts_table(attempts: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row for each attempt. Times are seconds since the epoch."""
    rows = [
        {
            **attempt,
            "nodes": " ".join(dict.fromkeys(attempt["members"])),
            "seconds": None if attempt["ended"] is None else attempt["ended"] - attempt["started"],
        }
        for attempt in attempts
    ]
    return _table(rows, ATTEMPTS)


def interruptions_table(interruptions: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row for each interruption, numbered from 1, with the parts of the way back."""
    rows = [
        {
            **interruption,
            **{f"{part}_seconds": seconds for part, seconds in interruption["seconds"].items()},
            "number": number,
        }
        for number, interruption in enumerate(interruptions, 1)
    ]
    return _table(rows, INTERRUPTIONS)


def read_confusion(path: Path) -> pd.DataFrame:
    """The confusion matrix.

    Raises:
        ValueError: it is damaged.
    """
    # A class may be called NA, or have a number for a name.
    cells = pd.read_csv(path, header=None, dtype=str, keep_default_na=False)
    names = cells.iloc[1:, 0].tolist()
    if names != cells.iloc[0, 1:].tolist() or not names:
        raise ValueError("its rows and columns differ")
    return pd.DataFrame(cells.iloc[1:, 1:].to_numpy().astype("int64"), index=names, columns=names)


def classes_table(confusion: pd.DataFrame | None) -> pd.DataFrame:
    """For each class: its images, how many were recognised, and which class they were mostly taken for instead."""
    rows = list[dict[str, Any]]()
    if confusion is None:
        return _table(rows, CLASSES)
    for place, name in enumerate(confusion.index):
        row = confusion.iloc[place]
        others = row.reset_index(drop=True).drop(place)
        worst = int(others.idxmax()) if len(others) and others.max() else None
        images, correct = int(row.sum()), int(row.iloc[place])
        rows.append(
            {
                "class": name,
                "images": images,
                "correct": correct,
                "accuracy": correct / images if images else None,
                "mostly_taken_for": None if worst is None else confusion.columns[worst],
                "taken_for_it": 0 if worst is None else int(row.iloc[worst]),
            }
        )
    return _table(rows, CLASSES)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The sample predictions.

    Raises:
        ValueError: they are damaged.
        KeyError: they are of another version.
    """
    found: list[dict[str, Any]] = [
        {
            "kind": str(sample["kind"]),
            "name": str(sample["name"]),
            "true": str(sample["true"]),
            "predicted": str(sample["predicted"]),
            "probability": float(sample["probability"]),
            "png": str(sample["png"]),
        }
        for sample in json.loads(path.read_bytes())
    ]
    if not all(_BASE64.fullmatch(sample["png"]) for sample in found):
        raise ValueError("an image is damaged")
    return found
