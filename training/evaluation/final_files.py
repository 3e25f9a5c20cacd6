"""Makes the CSV tables in `final/`, and `made_from` in `model.json`. Runs on rank 0."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc.base.git import git_revision
from hpc.base.text import csv_cell
from hpc.run.events.resumption import current_spec
from hpc.run.rundir import RunDir
from training.data.dataset import Data
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import device_name
from training.runtime.run_context import RunContext
from training.runtime.software import versions


def spec_of(run: RunDir) -> dict[str, Any]:
    """Return the fields of a run's spec; none for a training that was started by hand."""
    with suppress(OSError, ValueError):
        return dict(json.loads(current_spec(run).read_bytes()))
    return {}


def made_from(context: RunContext, data: Data, group: ProcessGroup) -> dict[str, Any]:
    """Return everything on which the model depends, ready for JSON. Unknown values are None."""
    run = context.run_dir
    spec = spec_of(context.run_dir)
    revision = None
    # A training that was started by hand has no copy of the code.
    with suppress(OSError):
        revision = run.revision.read_text().strip() if run.spec.exists() else git_revision(Path.cwd())
    splits = {"train": data.train, "val": data.val, "test": data.test}
    return {
        "run": run.name,
        "recipe": context.recipe,
        "config": asdict(context.config),
        "spec": spec or None,
        "data": {
            # Nodes may train from copies of the data. The spec has the path that the user gave.
            "path": None if context.config.synthetic else spec.get("data") or context.config.data,
            "fingerprint": data.fingerprint,
            "images": {name: len(split) for name, split in splits.items() if split is not None},
        },
        "code": {"revision": revision},
        "versions": versions(),
        "ranks": {
            "world_size": group.world_size,
            "device": device_name(group.device),
        },
        "attempt": context.attempt,
    }


_CLASS_COLUMNS = ("class", "images", "correct", "accuracy", "precision", "f1", "most confused with", "times")


def confusion_csv(labels: Tensor, predicted: Tensor, classes: tuple[str, ...]) -> str:
    """Return the confusion matrix, with a row per true and a column per predicted class. Both tensors are int64 [n]."""
    count = len(classes)
    matrix = torch.bincount(labels * count + predicted, minlength=count**2).view(count, count)
    rows = ([name, *row] for name, row in zip(classes, matrix.tolist(), strict=True))
    return _csv(["true class", *classes], rows)


def classes_csv(labels: Tensor, predicted: Tensor, classes: tuple[str, ...]) -> str:
    """Return a row for each class: counts, accuracy (recall), precision, F1, and the class it is most confused with.

    A cell is empty if its denominator is zero. The labels and predictions of the images are int64 [n].
    """
    right = labels == predicted
    images, predictions, correct = (
        torch.bincount(values, minlength=len(classes)).tolist() for values in (labels, predicted, labels[right])
    )
    # For each class, the most frequent wrong prediction, and how often it occurs. Needs no matrix of all pairs.
    confused: dict[int, tuple[str, int]] = {}
    wrong = Counter(zip(labels[~right].tolist(), predicted[~right].tolist(), strict=True))
    for (true, other), times in sorted(wrong.items()):
        if times > confused.get(true, ("", 0))[1]:
            confused[true] = (classes[other], times)
    rows = []
    for index, name in enumerate(classes):
        shares = (
            _share(correct[index], images[index]),
            _share(correct[index], predictions[index]),
            _share(2 * correct[index], images[index] + predictions[index]),
        )
        rows.append([name, images[index], correct[index], *shares, *confused.get(index, ("", 0))])
    return _csv(_CLASS_COLUMNS, rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows(map(csv_cell, row) for row in (header, *rows))
    return text.getvalue()
