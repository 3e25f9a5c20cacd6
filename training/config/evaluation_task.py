"""Owns the task that `hpc evaluate` gives the ranks: a model, and the split of the data to evaluate on.

Runs on the login node and on every rank; imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from hpc.base.errors import UserError
from training.config.dataset_layout import DataLayout

SplitChoice = Literal["auto", "test", "val", "train"]
Split = Literal["test", "val", "train"]


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """What a run of `hpc evaluate` evaluates. The directory of that run has a copy of the model."""

    source: str
    """Run or exported file from which the model comes."""
    checkpoint: str | None = None
    """Which model of the run: `best`, `last` or a step. None for an exported file."""
    step: int | None = None
    """Optimizer steps of the model's training; None if unknown."""
    epoch: int | None = None
    split: SplitChoice = "auto"
    other_data: bool = False
    """Whether the data differ from the training's data, so that all images can be used."""


def choose_split(task: EvaluationTask, layout: DataLayout, val_split: float) -> Split:
    """Return the split to evaluate on. `val_split` is the held-out share of data without a validation set.

    `auto` means the test set or, without one, the validation set. If there is neither, it means all images, but only
    if the training has not used them.

    Raises:
        UserError: the data does not have the split.
    """
    has = {"test": layout.test is not None, "val": layout.val is not None or val_split > 0, "train": True}
    splits: tuple[Split, ...] = ("test", "val", "train")
    if task.split == "auto":
        if not task.other_data and not (has["test"] or has["val"]):
            raise UserError(
                f"{layout.path} has neither a test set nor a validation set: use --split train, or --data with other "
                "images"
            )
        return next(split for split in splits if has[split])
    if not has[task.split]:
        present = " or ".join(split for split in splits if has[split])
        raise UserError(f"--split is {task.split}, but {layout.path} has no such part: use {present}")
    return task.split
