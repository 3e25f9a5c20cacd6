"""The learning rate as a pure function of the step, and of how the validation went. Runs on every rank.

Whatever a schedule remembers is in the progress, which is saved.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from training.config.rules import parse_step_epochs
from training.config.train_config import SCALE_BATCH, TrainConfig
from training.runtime.progress import Progress

# What torch's ReduceLROnPlateau takes for an improvement: a loss lower by this part of it.
_THRESHOLD = 1e-4
# Of the highest rate, as torch's OneCycleLR has them: the first, and the last as a part of the first.
_ONE_CYCLE_FIRST, _ONE_CYCLE_LAST = 1 / 25, 1e-4


@dataclass(frozen=True, kw_only=True)
class LrCourse:
    """Where a step is in a training."""

    step: int
    """Steps done before it."""
    warmup: int
    """Steps of the warm-up."""
    per_epoch: int
    total: int

    @property
    def part(self) -> float:
        """How much of the steps after the warm-up is done: 0 to 1."""
        return (self.step - self.warmup) / max(1, self.total - self.warmup)


def _cosine(start: float, end: float, part: float) -> float:
    """From start to end along half a cosine."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * part))


def _drops(config: TrainConfig, course: LrCourse) -> float:
    epoch, epochs = course.step // course.per_epoch, parse_step_epochs(config.lr_step_epochs)
    count = epoch // epochs[0] if len(epochs) == 1 else sum(epoch >= drop for drop in epochs)
    return config.lr_gamma**count


def _one_cycle(_config: TrainConfig, course: LrCourse) -> float:
    """Smith and Topin, "Super-convergence" (2018), as torch's OneCycleLR has it in two phases; the momentum stays."""
    top, last = max(0, course.warmup - 1), max(1, course.total - 1)
    if course.step < top:
        return _cosine(_ONE_CYCLE_FIRST, 1.0, course.step / top)
    return _cosine(1.0, _ONE_CYCLE_FIRST * _ONE_CYCLE_LAST, (course.step - top) / max(1, last - top))


# The part of the highest learning rate, by the names of `training.config.train_config.LrScheduler`.
# Cosine: Loshchilov and Hutter, "SGDR" (2017), without restarts.
CURVES: dict[str, Callable[[TrainConfig, LrCourse], float]] = {
    "cosine": lambda _, course: _cosine(1.0, 0.0, course.part),
    "step": _drops,
    "one-cycle": _one_cycle,
    # It falls by what the progress knows.
    "plateau": lambda *_: 1.0,
    "constant": lambda *_: 1.0,
}
_FACTORS: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "sqrt": math.sqrt, "linear": float}


def highest_rate(config: TrainConfig) -> float:
    """`--lr` for the global batch of this training."""
    return config.lr * _FACTORS[config.lr_scaling](config.batch_size / SCALE_BATCH)


def learning_rate(config: TrainConfig, progress: Progress, steps_per_epoch: int) -> float:
    """The learning rate of the step that follows.

    It rises in a line over the warm-up, then follows the schedule. One-cycle has a rise of its own.
    """
    total, step = steps_per_epoch * config.epochs, progress.step
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total)
    highest = highest_rate(config) * progress.lr_factor
    if step < warmup and config.lr_scheduler != "one-cycle":
        return highest * (step + 1) / warmup
    course = LrCourse(step=step, warmup=warmup, per_epoch=steps_per_epoch, total=total)
    return highest * CURVES[config.lr_scheduler](config, course)


def follow_plateau(config: TrainConfig, progress: Progress, val_loss: float) -> None:
    """After a validation, lower the learning rate if the loss has not fallen for too long.

    The same as torch's ReduceLROnPlateau with its defaults.
    """
    if config.lr_scheduler != "plateau":
        return
    if progress.plateau_loss is None or val_loss < progress.plateau_loss * (1 - _THRESHOLD):
        progress.plateau_loss, progress.plateau_epochs = val_loss, 0
    else:
        progress.plateau_epochs += 1
    if progress.plateau_epochs > config.plateau_patience:
        progress.lr_factor *= config.lr_gamma
        progress.plateau_epochs = 0
