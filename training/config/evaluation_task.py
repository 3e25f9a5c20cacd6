"""Owns the task that `hpc evaluate` gives the ranks: a model, and the split of the data to evaluate on.

The task is a file beside the copy of the model in the run directory. Runs on the login node and on every rank; imports
no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from hpc.base.errors import UserError
from hpc.base.files import write_json
from training.config.dataset_layout import DataLayout

_FILE = "evaluation.json"
SplitChoice = Literal["auto", "test", "val", "train"]
Split = Literal["test", "val", "train"]


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """What a run of `hpc evaluate` evaluates. The directory of that run has a copy of the model."""

    source: str
    """Run from which the model comes."""
    checkpoint: str = "best"
    """Which model of the run: `best`, `last` or a step."""
    step: int | None = None
    """Optimizer steps of the model's training; None if unknown."""
    epoch: int | None = None
    split: SplitChoice = "auto"
    other_data: bool = False
    """Whether the data differ from the training's data, so that all images can be used."""

    @property
    def title(self) -> str:
        """Words such as `Evaluation of best model of run-1, after step 500`."""
        which = f"{self.checkpoint} model of " if self.checkpoint in {"best", "last"} else ""
        after = f", after step {self.step:,}" if self.step is not None else ""
        return f"Evaluation of {which}{self.source}{after}"

    def save(self, model: Path) -> None:
        """Write the task into the directory of the model."""
        write_json(model / _FILE, asdict(self))

    @classmethod
    def load(cls, model: Path) -> Self | None:
        """Read the task of a run with this directory of a model; None if the run is not an evaluation.

        Raises UserError if the file is damaged, or of another version.
        """
        try:
            return cls(**json.loads((model / _FILE).read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (TypeError, ValueError) as error:
            raise UserError(f"{model / _FILE} is damaged, or of another version: {error}") from error


def choose_split(task: EvaluationTask, layout: DataLayout, val_split: float) -> Split:
    """Return the split to evaluate on. `val_split` is the held-out share of data without a validation set.

    `auto` means the test set or, without one, the validation set. If there is neither, it means all images, but only if
    the training has not used them. Raises UserError if the data does not have the split.
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
