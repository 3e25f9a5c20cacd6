"""Whether two finished trainings are the same, and where they differ. Needs no ranks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hpc.core.files import read_json_lines
from hpc.core.rundir import MODEL_WEIGHTS, RunDir
from training.checkpoint.sharded import read_full
from training.checkpoint.state import LOSS
from training.checkpoint.storage import STATE_VALUES, list_checkpoints

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# What tells when and how fast something was done, not what.
OF_THE_ATTEMPT = {"time", "attempt", "images_per_second", "train_seconds", "seconds"}
OF_THE_ATTEMPT |= {"data_wait_share", "memory_bytes"}


@dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """One part of two trainings, compared."""

    name: str
    compared: str
    difference: str
    """Of the first thing that differs; empty if all are equal."""


def compare_runs(one: RunDir, other: RunDir) -> list[ComparedPart]:
    """Compare all that two finished trainings have computed and written, bit by bit."""
    return [
        *_states(_newest(one), _newest(other)),
        *_models(one, other),
        _results(one, other),
        *_histories(one, other),
    ]


def _newest(run: RunDir) -> Path:
    return list_checkpoints(run.checkpoints)[0]


def _states(one: Path, other: Path) -> Iterator[ComparedPart]:
    tensors = [read_full(path) for path in (one, other)]
    for name, part in (
        ("weights", _select(tensors, "model/", statistics=False)),
        ("batch statistics", _select(tensors, "model/", statistics=True)),
        ("moving average", _select(tensors, "ema/", statistics=None)),
        ("optimizer", _select(tensors, "optimizer/", statistics=None)),
    ):
        yield compare_tensors(name, *part)
    values = [json.loads((path / STATE_VALUES).read_text()) for path in (one, other)]
    for part, full in zip(values, tensors, strict=True):
        part["loss_meter"] = _timeless(part["loss_meter"]) | {"loss": full[LOSS].item()}
    for name, key in (
        ("learning rates", "optimizer"),
        ("loss scale", "scaler"),
        ("progress", "progress"),
        ("loss meter", "loss_meter"),
        ("corrupt images", "corrupt_images"),
    ):
        yield compare_values(name, [values[0][key]], [values[1][key]])


def _select(both: list[dict[str, Tensor]], prefix: str, *, statistics: bool | None) -> list[dict[str, Tensor]]:
    def belongs(name: str) -> bool:
        return name.startswith(prefix) and statistics in {None, name.endswith(_STATISTICS)}

    return [{name: value for name, value in tensors.items() if belongs(name)} for tensors in both]


def _models(one: RunDir, other: RunDir) -> Iterator[ComparedPart]:
    for name in ("final", "best"):
        files = [run.path / name / MODEL_WEIGHTS for run in (one, other)]
        found = [load_file(file) if file.exists() else {} for file in files]
        yield compare_tensors(f"{name} model", *found)


def _results(one: RunDir, other: RunDir) -> ComparedPart:
    """What is said of the models, and what the final one takes for what."""
    found = []
    for run in (one, other):
        files = [path for path in (run.final / "result.json", run.best / "result.json") if path.exists()]
        results: list[Any] = [_timeless(json.loads(path.read_text())) for path in files]
        confusion = run.final / "confusion.csv"
        found.append([*results, *(confusion.read_text().splitlines() if confusion.exists() else [])])
    return compare_values("results", *found)


def _histories(one: RunDir, other: RunDir) -> Iterator[ComparedPart]:
    for name in ("train", "eval"):
        files = [run.path / "metrics" / f"{name}.jsonl" for run in (one, other)]
        yield compare_values(
            f"history: {name}", *([_timeless(line) for line in read_json_lines(file)] for file in files)
        )


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in OF_THE_ATTEMPT}


def compare_tensors(name: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> ComparedPart:
    """Compare tensors by name."""
    numbers = sum(value.numel() for value in one.values())
    compared = f"{len(one)} tensors, {numbers:,} numbers" if one or other else "none"
    if one.keys() != other.keys():
        return ComparedPart(name=name, compared=compared, difference=f"only one has {min(one.keys() ^ other.keys())}")
    differences = (text for key in one if (text := _difference(key, one[key], other[key])))
    return ComparedPart(name=name, compared=compared, difference=next(differences, ""))


def _difference(name: str, one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{name} is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    if torch.equal(one, other):
        return ""
    off = (one.double() - other.double()).abs()
    return f"{name}: {int((off != 0).sum()):,} of {one.numel():,} numbers, by up to {float(off.max()):.3g}"


def compare_values(name: str, one: list[Any], other: list[Any]) -> ComparedPart:
    """Compare lists of plain values."""
    if len(one) != len(other):
        return ComparedPart(
            name=name, compared=f"{len(one)} records", difference=f"{len(one)} and {len(other)} records"
        )
    differences = (f"{left} and {right}" for left, right in zip(one, other, strict=True) if left != right)
    records = f"{len(one)} records" if len(one) != 1 else "1 record"
    return ComparedPart(name=name, compared=records, difference=next(differences, ""))
