"""CSV tables of `final/`: confusion matrix, classes, history. Pure; runs on rank 0."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

Record = Mapping[str, Any]

_CLASS_COLUMNS = ("class", "images", "correct", "accuracy", "precision", "f1", "most confused with", "times")
_HISTORY_COLUMNS = (
    *("epoch", "step", "train_loss", "lr", "train_seconds", "images_per_second", "data_wait_share"),
    *("val_loss", "val_accuracy", "val_top5_accuracy", "val_seconds"),
)


def confusion_csv(confusion: Tensor, classes: tuple[str, ...]) -> str:
    """The confusion matrix (int64 [classes, classes]): a row for each true class, a column for each predicted one."""
    rows = ([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))
    return _csv(["true class", *classes], rows)


def classes_csv(confusion: Tensor, classes: tuple[str, ...]) -> str:
    """A row for each class: counts, accuracy (recall), precision, F1, and the class that it is most confused with.

    A share without a denominator is empty.
    """
    predictions = confusion.sum(0).tolist()
    rows = []
    for index, (name, row) in enumerate(zip(classes, confusion.tolist(), strict=True)):
        images, correct, predicted = sum(row), row[index], predictions[index]
        wrong = [0 if column == index else count for column, count in enumerate(row)]
        times = max(wrong)
        shares = _share(correct, images), _share(correct, predicted), _share(2 * correct, images + predicted)
        rows.append([name, images, correct, *shares, classes[wrong.index(times)] if times else "", times])
    return _csv(_CLASS_COLUMNS, rows)


def history_csv(train: Iterable[Record], evaluations: Iterable[Record]) -> str:
    """A row for each epoch.

    Args:
        train: the lines of `metrics/train.jsonl`; the last of each epoch is at its end.
        evaluations: the lines of `metrics/eval.jsonl`.
    """
    epochs: dict[int, list[Record]] = {}
    for record in train:
        epochs.setdefault(record["epoch"], []).append(record)
    validations = {record["epoch"]: record for record in evaluations if record["split"] == "val"}
    rows = []
    previous: Record = {"step": 0, "train_seconds": 0.0}
    for epoch, records in epochs.items():
        rows.append(_epoch(epoch, previous, records, validations.get(epoch, {})))
        previous = records[-1]
    return _csv(_HISTORY_COLUMNS, ([row[column] for column in _HISTORY_COLUMNS] for row in rows))


def _epoch(epoch: int, previous: Record, records: Sequence[Record], validation: Record) -> dict[str, Any]:
    """The row of an epoch from its lines, each of which is the mean over the steps since the line before it."""
    starts = [previous, *records]
    steps = [record["step"] - start["step"] for start, record in zip(starts, records, strict=False)]
    # Without saves and validations, which train_seconds leaves out.
    seconds = [record["train_seconds"] - start["train_seconds"] for start, record in zip(starts, records, strict=False)]
    total_seconds = max(sum(seconds), 1e-9)
    return {
        "epoch": epoch,
        "step": records[-1]["step"],
        "train_loss": round(_dot(records, "loss", steps) / sum(steps), 6),
        "lr": records[-1]["lr"],
        "train_seconds": round(sum(seconds), 3),
        "images_per_second": round(_dot(records, "images_per_second", seconds) / total_seconds, 1),
        "data_wait_share": round(_dot(records, "data_wait_share", seconds) / total_seconds, 4),
        "val_loss": validation.get("loss"),
        "val_accuracy": validation.get("accuracy"),
        "val_top5_accuracy": validation.get("top5_accuracy"),
        "val_seconds": validation.get("seconds"),
    }


def _dot(records: Sequence[Record], name: str, weights: Sequence[float]) -> float:
    return sum(float(record[name]) * weight for record, weight in zip(records, weights, strict=True))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
