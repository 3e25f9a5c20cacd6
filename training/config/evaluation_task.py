"""The task that `hpc evaluate` gives the ranks: a model, and a part of some data.

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
    """One evaluation, as in its run's spec. The model is in the run's own directory."""

    source: str
    """The run, or the exported file, that the model comes from."""
    checkpoint: str | None = None
    """The run's model: `best`, `last` or a step; None: it is an exported file."""
    step: int | None = None
    """Step of the model; None: not known."""
    epoch: int | None = None
    split: SplitChoice = "auto"
    other_data: bool = False
    """True if the data is not the training's, so that none of it is held out."""


def choose_split(task: EvaluationTask, layout: DataLayout, val_split: float) -> Split:
    """Choose the part of the data to evaluate on; `val_split` is the share that is held out if there is no `val/`.

    `auto` means the test set, else the validation set, else all images, if the training has seen none of them.

    Raises:
        UserError: the data has no such part.
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
