"""A line for each epoch of a training, from its metrics: `history.csv`. Pure; runs on rank 0."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

_COLUMNS = (
    *("epoch", "step", "train_loss", "lr", "train_seconds", "images_per_second", "data_wait_share"),
    *("val_loss", "val_accuracy", "val_top5_accuracy", "val_seconds"),
)


def history_csv(train: Iterable[Record], evaluations: Iterable[Record]) -> str:
    """The history of a training as CSV.

    Args:
        train: the lines of `metrics/train.jsonl`, of which one is at the end of each epoch.
        evaluations: those of `metrics/eval.jsonl`.
    """
    epochs: dict[int, list[Record]] = {}
    for record in train:
        epochs.setdefault(record["epoch"], []).append(record)
    validated = {record["epoch"]: record for record in evaluations if record["split"] == "val"}
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    before: Record = {"step": 0, "train_seconds": 0.0}
    for epoch, records in epochs.items():
        writer.writerow(_row(epoch, before, records, validated.get(epoch, {})))
        before = records[-1]
    return text.getvalue()


def _row(epoch: int, before: Record, records: Sequence[Record], validation: Record) -> dict[str, Any]:
    """An epoch, whose lines follow the line `before`. Each line is the mean over the steps since the last one."""
    last = records[-1]
    starts = [before, *records]
    steps = [record["step"] - start["step"] for start, record in zip(starts, records, strict=False)]
    # What the metrics leave out, such as a save, is left out here too. Older lines tell no waiting.
    seconds = [record["train_seconds"] - start["train_seconds"] for start, record in zip(starts, records, strict=False)]
    whole = max(sum(seconds), 1e-9)
    images = sum(record["images_per_second"] * each for record, each in zip(records, seconds, strict=True))
    waited = sum(record.get("data_wait_share", 0.0) * each for record, each in zip(records, seconds, strict=True))
    loss = sum(record["loss"] * each for record, each in zip(records, steps, strict=True)) / sum(steps)
    return {
        "epoch": epoch,
        "step": last["step"],
        "train_loss": round(loss, 6),
        "lr": last["lr"],
        "train_seconds": round(sum(seconds), 3),
        "images_per_second": round(images / whole, 1),
        "data_wait_share": round(waited / whole, 4),
        "val_loss": validation.get("loss"),
        "val_accuracy": validation.get("accuracy"),
        "val_top5_accuracy": validation.get("top5_accuracy"),
        "val_seconds": validation.get("seconds"),
    }
