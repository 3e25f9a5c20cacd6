"""Checks the values of the training flags, and finds combinations that cannot work or have no effect.

Pure; runs on the login node and on every rank. `config` is a TrainConfig, typed Any since its module imports this one.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

from hpc.base.errors import UserError
from hpc.base.text import flag
from training.config.dataset_layout import NAMED_DATA
from training.config.model_names import SMALL_CNN, TIMM

_SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600}
# Half of the 1 % that the help promises, because some costs of a snapshot cannot be measured while it is taken.
AUTO_OVERHEAD = 0.005
# For each field: the words that it accepts besides steps and durations.
INTERVAL_WORDS: dict[str, dict[str, dict[str, Any]]] = {
    "checkpoint_every": {},
    "snapshot_every": {"auto": {"seconds": 0.5, "max_overhead": AUTO_OVERHEAD}, "off": {}},
}


def parse_interval(field: str, text: str) -> dict[str, Any]:
    """Parse `500` (steps), a duration such as `30s`, `10m` or `2h`, or a word in INTERVAL_WORDS.

    Returns the arguments of torchrelay's `SaveTimes`, whose import would delay `hpc submit`. Raises UserError if the
    text has another form, or is zero.
    """
    words = INTERVAL_WORDS[field]
    if text.strip() in words:
        return words[text.strip()]
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])|(\d+)", text.strip()):
        amount, unit, steps = match.groups()
        if steps and int(steps) > 0:
            return {"steps": int(steps)}
        if amount and float(amount) > 0:
            return {"seconds": float(amount) * _SECONDS_OF_UNIT[unit]}
    names = "".join(f"{word}, " for word in words)
    raise UserError(f"{flag(field)} is {text!r}: use {names}steps such as 500, or a duration such as 30s, 10m or 2h")


Test = Callable[[Any], bool]


def check(config: Any) -> None:
    """Raise UserError, which says what to use instead, if a value or a combination cannot work."""
    for name, (accepts, fix) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not (accepts(value) and value != math.inf):
            raise UserError(f"{flag(name)} is {value!r}: use {fix}")
    for name in INTERVAL_WORDS:
        parse_interval(name, getattr(config, name))
    parse_step_epochs(config.lr_step_epochs)
    parse_crop_scale(config.crop_scale)
    parse_crop_pct(config.eval_crop_pct)
    for conflict, fix in _CONFLICTS:
        if conflict(config):
            raise UserError(fix)
    for name in _NOT_WITH_FSDP if config.strategy == "fsdp" else ():
        if getattr(config, name) != getattr(type(config), name):
            raise UserError(f"--strategy fsdp cannot be combined with {flag(name)}: leave one out")


_LARGEST_SEED = 2**63 - 1


def _at_least(minimum: int, words: str = "") -> tuple[Test, str]:
    return lambda value: value >= minimum, f"{minimum} or more{words}"


_SHARE: tuple[Test, str] = (lambda value: 0 <= value < 1, "0 or more and less than 1")
# For each field with limits: a test that values within the limits pass, and what to use. The parser checks the types.
_RANGES: dict[str, tuple[Test, str]] = {
    **dict.fromkeys(("momentum", "label_smoothing", "ema_decay", "val_split"), _SHARE),
    **dict.fromkeys(("epochs", "grad_accum_steps", "repeated_augmentation", "keep_checkpoints"), _at_least(1)),
    **dict.fromkeys(("weight_decay", "min_lr", "max_hours", "clip_grad_norm", "mixup", "cutmix"), _at_least(0)),
    **dict.fromkeys(
        ("head_hidden", "max_corrupt_images", "warmup_epochs", "num_workers", "color_jitter"), _at_least(0)
    ),
    **dict.fromkeys(("plateau_patience", "early_stopping_patience"), _at_least(0, " epochs")),
    **dict.fromkeys(("image_size", "initial_image_size", "eval_image_size"), _at_least(8, " pixels")),
    "model": (bool, f"{SMALL_CNN}, a torchvision model such as resnet50, or {TIMM}NAME"),
    "weights": (bool, "a file or a name"),
    "batch_size": _at_least(1, " (images of all ranks together)"),
    "log_every": _at_least(1, " steps"),
    "lr": (lambda value: value > 0, "a number above 0"),
    "layer_decay": (lambda value: 0 < value <= 1, "more than 0, and at most 1"),
    "lr_gamma": (lambda value: 0 < value < 1, "more than 0 and less than 1"),
    "randaugment_magnitude": (lambda value: 0 <= value <= 30, "a whole number from 0 to 30"),
    "random_erasing": (lambda value: 0 <= value <= 1, "a probability from 0 to 1"),
    "seed": (lambda value: 0 <= value <= _LARGEST_SEED, f"a whole number from 0 to {_LARGEST_SEED}"),
}


@cache
def parse_step_epochs(text: str) -> tuple[int, ...]:
    """Parse `30` (every 30 epochs) or `150,225` (at these epochs). Raises UserError if the text has another form."""
    if re.fullmatch(r"\d+(,\d+)*", text):
        epochs = tuple(int(part) for part in text.split(","))
        if epochs[0] > 0 and all(earlier < later for earlier, later in pairwise(epochs)):
            return epochs
    raise UserError(f"--lr-step-epochs is {text!r}: use a number such as 30, or rising epochs such as 150,225")


def parse_crop_scale(text: str) -> tuple[float, float]:
    """Parse two numbers, such as `0.08,1`. Raises UserError if they are not rising, above 0 and up to 1."""
    numbers = [float(_fraction(part)) for part in str(text).split(",")]
    if len(numbers) == 2 and 0 < numbers[0] <= numbers[1] <= 1:
        return numbers[0], numbers[1]
    raise UserError(
        f"--crop-scale is {text!r}: use two numbers above 0 and up to 1, the smaller one first, such as 0.08,1"
    )


def parse_crop_pct(text: str) -> Fraction:
    """Parse a number above 0 and up to 1, such as `224/256` or `0.875`. Raises UserError for other texts."""
    if 0 < (number := _fraction(text)) <= 1:
        return number
    raise UserError(f"--eval-crop-pct is {text!r}: use a number above 0 and up to 1, such as 0.875")


def _fraction(text: str) -> Fraction:
    """Return a text such as `3/4` or `0.75` as a number, or 0 for any other text."""
    try:
        return Fraction(text)
    except (ValueError, TypeError, ZeroDivisionError):
        return Fraction()


# A test that is true for conflicting flags, and the message: the reason, and what to use.
_CONFLICTS: tuple[tuple[Test, str], ...] = (
    (lambda c: not (c.data or c.synthetic), f"--data is missing: give a directory, {NAMED_DATA}, or use --synthetic"),
    (
        lambda c: c.initial_image_size is not None and c.initial_image_size >= (c.image_size or math.inf),
        "--initial-image-size must be smaller than --image-size: give a smaller one, or leave it out",
    ),
    (lambda c: c.freeze_backbone and c.weights is None, "--freeze-backbone needs pretrained weights: give --weights"),
    (
        lambda c: c.loss == "bce" and c.class_weights != "none",
        "--loss bce cannot be combined with --class-weights: leave one out",
    ),
    (
        lambda c: c.compile and c.sync_bn,
        "--compile cannot be combined with --sync-bn, which communicates inside the model: leave one out",
    ),
    (
        lambda c: c.sync_bn and c.model.startswith(TIMM),
        "--sync-bn cannot be combined with timm's models, whose normalization includes the activation: leave it out",
    ),
    (
        lambda c: c.compile and c.checkpoint_activations,
        "--compile cannot be combined with --checkpoint-activations: leave one out",
    ),
    (
        lambda c: c.strategy == "fsdp" and c.amp == "fp16",
        "--strategy fsdp cannot be combined with --amp fp16, because it does not scale the loss: use --amp bf16",
    ),
)
_NOT_WITH_FSDP = ("ema_decay", "sync_bn", "compile", "compress_gradients")


# A field, a test that is true if the field has an effect, and the reason why it has none.
_EFFECTS: tuple[tuple[str, Test, str], ...] = (
    ("lr_step_epochs", lambda c: c.lr_scheduler == "step", "it applies to --lr-scheduler step"),
    ("lr_gamma", lambda c: c.lr_scheduler in {"step", "plateau"}, "it applies to --lr-scheduler step and plateau"),
    ("plateau_patience", lambda c: c.lr_scheduler == "plateau", "it applies to --lr-scheduler plateau"),
    ("early_stopping_patience", lambda c: c.early_stopping_patience < c.epochs - 1, "there are too few --epochs"),
    ("nesterov", lambda c: c.optimizer == "sgd" and c.momentum > 0, "it applies to --optimizer sgd with --momentum"),
    ("min_lr", lambda c: c.lr_scheduler == "cosine", "it applies to --lr-scheduler cosine"),
    ("decay_norm_and_bias", lambda c: c.weight_decay > 0, "--weight-decay is 0"),
    ("crop_scale", lambda c: c.crop in {"auto", "resized"}, "it applies to --crop resized"),
    ("auto_augment_interpolation", lambda c: c.auto_augment != "none", "--auto-augment is none"),
    ("randaugment_magnitude", lambda c: c.auto_augment == "randaugment", "it applies to --auto-augment randaugment"),
)


def without_effect(config: Any) -> list[str]:
    """Return a warning for each flag of a TrainConfig that differs from its default but has no effect."""
    lines = []
    for name, has_effect, why in _EFFECTS:
        value = getattr(config, name)
        if value != getattr(type(config), name) and not has_effect(config):
            lines.append(f"{flag(name) if value is True else f'{flag(name)} {value}'} has no effect: {why}")
    if config.warmup_epochs > config.epochs:
        lines.append(f"--warmup-epochs {config.warmup_epochs:g} is more than --epochs: --lr is never reached")
    return lines


def check_device(config: Any, *, has_gpus: bool) -> None:
    """Raise UserError if a flag needs GPUs, unless the ranks have some (`has_gpus`)."""
    if config.sync_bn and not has_gpus:
        raise UserError("--sync-bn needs GPUs, because torch's SyncBatchNorm refuses CPUs: leave it out")


def check_validation(config: Any, *, validates: bool) -> None:
    """Raise UserError if a flag needs a validation set, unless there is one (`validates`)."""
    if validates:
        return
    fix = "leave out --synthetic" if config.synthetic else "use --val-split 0.1, or add val/"
    if config.early_stopping_patience > 0:
        needed_by = f"--early-stopping-patience {config.early_stopping_patience}"
    elif config.lr_scheduler == "plateau":
        needed_by = "--lr-scheduler plateau"
    else:
        return
    raise UserError(f"{needed_by} needs validation data, and there are none: {fix}")
