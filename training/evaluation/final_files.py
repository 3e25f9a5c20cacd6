"""The content of `final/` beside the model: CSV tables and sample predictions. Runs on rank 0."""

import base64
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from hpc.core.text import csv_cell
from training.data.batch_schedule import BatchRequest
from training.data.loader import ImageSource
from training.evaluation.evaluator import Evaluation

Record = Mapping[str, Any]

_CLASS_COLUMNS = ("class", "images", "correct", "accuracy", "precision", "f1", "most confused with", "times")
_HISTORY_COLUMNS = (
    *("epoch", "step", "train_loss", "lr", "train_seconds", "images_per_second", "data_wait_share"),
    *("val_loss", "val_accuracy", "val_top5_accuracy", "val_seconds"),
)
_SAMPLES = 12
# Large enough to recognise a photograph; all samples together take less than a megabyte.
_MAX_SIDE = 96


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
    """A row for each epoch, from the lines of `metrics/train.jsonl` and `metrics/eval.jsonl`."""
    epochs: dict[int, list[Record]] = {}
    for record in train:
        epochs.setdefault(record["epoch"], []).append(record)
    validations = {record["epoch"]: record for record in evaluations if record["split"] == "val"}
    rows = []
    last: Record = {"step": 0, "train_seconds": 0.0}
    for epoch, records in epochs.items():
        # Each line is the mean over the steps since the line before it. The last of an epoch is at its end.
        pairs = list(zip([last, *records], records, strict=False))
        steps = [record["step"] - before["step"] for before, record in pairs]
        # Without saves and validations, which train_seconds leaves out.
        seconds = [record["train_seconds"] - before["train_seconds"] for before, record in pairs]
        total_seconds = max(sum(seconds), 1e-9)
        last = records[-1]
        means = (
            round(_dot(records, "images_per_second", seconds) / total_seconds, 1),
            round(_dot(records, "data_wait_share", seconds) / total_seconds, 4),
        )
        loss = round(_dot(records, "loss", steps) / sum(steps), 6)
        validation = [validations.get(epoch, {}).get(name) for name in ("loss", "accuracy", "top5_accuracy", "seconds")]
        rows.append([epoch, last["step"], loss, last["lr"], round(sum(seconds), 3), *means, *validation])
    return _csv(_HISTORY_COLUMNS, rows)


def _dot(records: Sequence[Record], name: str, weights: Sequence[float]) -> float:
    return sum(float(record[name]) * weight for record, weight in zip(records, weights, strict=True))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows(map(csv_cell, row) for row in (header, *rows))
    return text.getvalue()


def samples_json(source: ImageSource, test: Evaluation, classes: Sequence[str]) -> str:
    """Images spread evenly over the test set (`even`), and the most confident errors (`mistake`).

    The choice depends on the model alone, not on the number of ranks.

    Raises:
        UserError: this node cannot read them.
    """
    readable = sorted(set(range(len(source.labels))) - set(test.corrupt))
    count = min(_SAMPLES, len(readable))
    # From the middle of equal stretches: the first images of a folder are all of one class.
    even = [readable[(2 * number + 1) * len(readable) // (2 * count)] for number in range(count)]
    wrong = set((test.predicted != source.labels).nonzero().flatten().tolist()) - set(test.corrupt)
    mistakes = sorted(wrong, key=lambda index: (-float(test.probability[index]), index))[:_SAMPLES]
    groups = {"even": even, "mistake": mistakes}
    samples = [_sample(source, test, classes, kind, index) for kind, indices in groups.items() for index in indices]
    return json.dumps(samples, indent=1) + "\n"


def _sample(source: ImageSource, test: Evaluation, classes: Sequence[str], kind: str, index: int) -> dict[str, Any]:
    pixels = source[BatchRequest(indices=(index,), epoch=None)].images[0].cpu()  # uint8 [C, H, W]
    # Unless the image has 3 channels, show the first one.
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy())
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    png = io.BytesIO()
    image.save(png, "PNG")
    return {
        "kind": kind,
        "index": index,
        "name": source.name(index),
        "true": classes[int(source.labels[index])],
        "predicted": classes[int(test.predicted[index])],
        "probability": round(float(test.probability[index]), 4),
        "png": base64.b64encode(png.getvalue()).decode(),
    }
