"""Decides which training flags may change in a run that has begun: by `hpc resume`, by `hpc fork`, or not at all.

`hpc resume` may change no step; `hpc fork` continues from the saved state and may change the next steps. Flags on which
that state depends need a new run. Pure; runs on the login node. Ranks compare IDENTIFYING with the
flags of a checkpoint.
"""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.text import flag
from hpc.programs.program_flags import Begun
from hpc.run.rundir import MODEL_WEIGHTS
from training.config.train_config import Adjustable, TrainConfig

IDENTIFYING = (
    *("model", "batch_size", "seed", "optimizer", "nesterov", "ema_decay", "layer_decay"),
    *("image_size", "eval_image_size", "eval_crop_pct", "interpolation", "val_split", "freeze_backbone", "head_hidden"),
)
"""The flags on which a saved state depends. A training with another value needs a new run."""
ADJUSTABLE = frozenset(field.name for field in fields(Adjustable))
# `weights` affects only the start of a training. `synthetic` replaces the data, whose fingerprint is in a saved state.
OF_THE_BEGINNING = frozenset({"weights", "synthetic"})
# For each way in which a training ends: the flag that limits it (0: no limit), and how to train longer.
_LIMITS = {
    None: ("epochs", "to train longer, give more --epochs than it has"),
    "early_stopping": (
        "early_stopping_patience",
        "it stopped early; to train longer, give a larger --early-stopping-patience, or 0",
    ),
    "max_hours": ("max_hours", "it reached --max-hours; to train longer, give a larger --max-hours, or 0"),
}


def refuse_on_resume(names: Collection[str], run: str, best: Path) -> None:
    """Refuse training flags that `hpc resume` may not set.

    `names` are the flags on the command line, without leading dashes; `run` is the run's name as the user typed it;
    `best` is the directory of the run's best model.

    Raises:
        UserError: says what to type instead.
    """
    for name in (field.name for field in fields(TrainConfig)):
        if name.replace("_", "-") not in names or name in ADJUSTABLE:
            continue
        refuse_on_fork({name}, best)
        raise UserError(
            f"{flag(name)} would change the steps of run {run}, which hpc resume continues as it was: type "
            f"hpc fork {run} --name NEW {flag(name)} ..., which continues from its newest checkpoint under a new name"
        )


def refuse_on_fork(changed: Collection[str], best: Path) -> None:
    """Refuse changed fields on which the saved state depends, or which apply only to a new training.

    Raises:
        UserError: says what to type instead.
    """
    for name in sorted({*IDENTIFYING, *OF_THE_BEGINNING}.intersection(changed)):
        raise UserError(
            f"{flag(name)} cannot change in a training that has begun: type hpc submit --name NEW {flag(name)} ... for "
            f"a new one; with --weights {best / MODEL_WEIGHTS} it begins with the weights of this one, if the model is "
            "the same"
        )


def check_adjusted(before: TrainConfig, after: TrainConfig, begun: Begun, epoch: int) -> None:
    """Refuse --epochs that would change the steps done, and flags that add no steps to a complete training.

    `epoch` is the number of the epoch that has begun last; 0 before the first step.

    Raises:
        UserError: says what to type instead.
    """
    fork = f"type hpc fork {begun.typed} --name NEW --epochs {after.epochs}"
    if after.epochs != before.epochs and epoch:
        depends = ""
        if before.initial_image_size is not None:
            depends = "--initial-image-size, the sizes of the images depend"
        elif before.lr_scheduler == "cosine":
            depends = "--lr-scheduler cosine, the learning rates depend"
        elif before.warmup_epochs > min(before.epochs, after.epochs):
            depends = f"--warmup-epochs {before.warmup_epochs:g}, the learning rates depend"
        if depends:
            raise UserError(
                f"--epochs is {after.epochs}, but with {depends} on it, and the steps so far are those of --epochs "
                f"{before.epochs}: {fork}, which continues from the newest checkpoint"
            )
        if after.epochs < epoch:
            raise UserError(
                f"--epochs is {after.epochs}, but run {begun.typed} has been in epoch {epoch}: use {epoch} or more"
            )
    name, advice = _LIMITS[begun.ended]
    if begun.complete and 0 < getattr(after, name) <= getattr(before, name):
        raise UserError(f"run {begun.typed} is complete: {advice}")
