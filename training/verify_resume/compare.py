"""Compares two finished trainings, and finds the first difference in each part. Needs no ranks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torchrelay.checkpoint_files import list_checkpoints
from torchrelay.saving.restoring import read_state

from hpc.base.files import read_json_lines
from hpc.run.rundir import MODEL_WEIGHTS, RunDir

# Fields of records that describe an attempt and its speed, not the training.
OF_THE_ATTEMPT = {"time", "attempt", "images_per_second", "train_seconds", "spent_seconds", "seconds"}
OF_THE_ATTEMPT |= {"data_wait_share", "memory_bytes"}
# The object of a state that describes the ranks which computed it. On other nodes, the same steps have other ranks.
_NUMERICS = "numerics"


@dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """The result of comparing one part of two trainings."""

    name: str
    compared: str
    difference: str
    """Description of the first difference; empty if the parts are equal."""


def compare_runs(one: RunDir, other: RunDir) -> list[ComparedPart]:
    """Compare the last states, the models, results and metrics of two finished trainings, bit by bit."""
    parts = list(_states(*(list_checkpoints(run.checkpoints)[0] for run in (one, other))))
    for name in ("final", "best"):
        files = [run.path / name / MODEL_WEIGHTS for run in (one, other)]
        parts.append(compare_tensors(f"{name} model", *(load_file(file) if file.exists() else {} for file in files)))
    parts.append(compare_values("results", _results(one), _results(other)))
    metrics = {"train": [one.train_metrics, other.train_metrics], "eval": [one.eval_metrics, other.eval_metrics]}
    for name, paths in metrics.items():
        lines = ([_timeless(line) for line in read_json_lines(path)] for path in paths)
        parts.append(compare_values(f"history: {name}", *lines))
    return parts


def _states(one: Path, other: Path) -> Iterator[ComparedPart]:
    """Yield the compared parts of two checkpoints: the tensors and the other values of each object."""
    (tensors, values), (other_tensors, other_values) = map(read_state, (one, other))
    for key, value in values["objects"].items():
        if key == _NUMERICS:
            continue
        name = key.replace("_", " ")
        both = (
            {path: part for path, part in whole.items() if path.startswith(f"{key}/")}
            for whole in (tensors, other_tensors)
        )
        part = compare_tensors(name, *both)
        plain = compare_values(name, [_timeless(value)], [_timeless(other_values["objects"][key])])
        yield plain if part.compared == "none" else replace(part, difference=part.difference or plain.difference)


def _results(run: RunDir) -> list[Any]:
    """Return `result.json` of the final and the best model, and the lines of the confusion matrix."""
    files = [path for path in (run.final_result, run.best / "result.json") if path.exists()]
    results = [_timeless(json.loads(path.read_text())) for path in files]
    return [*results, *(run.confusion.read_text().splitlines() if run.confusion.exists() else [])]


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in OF_THE_ATTEMPT}


def compare_tensors(name: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> ComparedPart:
    """Compare tensors by name."""
    values = sum(value.numel() for value in one.values())
    compared = f"{len(one)} tensors, {values:,} values" if one or other else "none"
    differences = (text for key in sorted(one.keys() | other.keys()) if (text := _differs(key, one, other)))
    return ComparedPart(name=name, compared=compared, difference=next(differences, ""))


def _differs(name: str, all_of_one: Mapping[str, Tensor], all_of_other: Mapping[str, Tensor]) -> str:
    """Return how a tensor differs, or an empty text if it is equal."""
    one, other = all_of_one.get(name), all_of_other.get(name)
    if one is None or other is None:
        return f"{name} is missing in the {'un' if one is None else ''}interrupted training"
    try:
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    except AssertionError as error:
        return f"{name}: {' '.join(str(error).split())}"
    return ""


def compare_values(name: str, one: list[Any], other: list[Any]) -> ComparedPart:
    """Compare lists of plain values."""
    compared = f"{len(one)} records" if len(one) != 1 else "1 record"
    if len(one) != len(other):
        return ComparedPart(name=name, compared=compared, difference=f"records: {_both(len(one), len(other))}")
    lines = (json.dumps(records, indent=1, sort_keys=True).splitlines() for records in (one, other))
    pairs = (pair for pair in zip_longest(*lines, fillvalue="nothing") if pair[0] != pair[1])
    return ComparedPart(name=name, compared=compared, difference=next((_both(*pair) for pair in pairs), ""))


def _both(one: object, other: object) -> str:
    return f"{one} uninterrupted, {other} interrupted"
