"""What a training run is told: the single source of every training flag, and what can be checked without a GPU.

Runs on the login node (before anything is queued) and on every rank. Imports neither torch nor torchvision:
importing them costs seconds, and a login node may not even be able to.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hpc.core.errors import UserError
from training.config.choices import OPTIMIZERS, SCALINGS, SCHEDULES, flag, listed, parse_drops
from training.config.combinations import check_combinations, check_validation, without_effect
from training.config.dataset_layout import FASHION_MNIST, DataLayout, check_data, resolve_data
from training.config.interval import WORDS, Interval, parse_interval
from training.config.model_names import SMALL_CNN, check_model, torchvision_models
from training.config.pretrained import resolve_weights
from training.config.recipe import recipe_path, recipes

__all__ = [
    "DataLayout",
    "Interval",
    "RecipeName",
    "TrainConfig",
    "check_data",
    "check_model",
    "check_validation",
    "check_world",
    "flag",
    "parse_interval",
    "recipe_path",
    "recipes",
    "resolve_data",
    "resolve_weights",
    "to_argv",
    "torchvision_models",
    "without_effect",
]


# What `--recipe` takes, wherever flags are read.
RecipeName = Annotated[str | None, listed("The flags of a training that is known to work.", recipes())]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train on what, and how. Every field is a flag."""

    data: str = ""
    """A directory of images, packed images, IDX or CIFAR files, or `fashion-mnist` (Debian's dataset-fashion-mnist)."""
    synthetic: bool = False
    """Train on generated images of the model's size, and do not read --data: the speed that no data can exceed."""
    model: str = SMALL_CNN
    """`small-cnn`, `resnet20` (to 110: for small images), or a torchvision classification model such as resnet50."""
    weights: str | None = None
    """Weights to begin with: a .safetensors or .pth file, or a name of torchvision's, such as IMAGENET1K_V1, that is in
    its cache. Of a head for another number of classes the rest is used. By default they follow from the seed."""
    freeze_backbone: bool = False
    """Train the head alone: all before it stays as it is in --weights, batch statistics too."""
    head_hidden: int = 0
    """Width of one more layer in the head, before the last one; 0: none."""
    epochs: int = 8
    """Passes over the training set."""
    batch_size: int = 512
    """Images per optimizer step, of all ranks together: they share it, whatever their number."""
    lr: float = 0.15
    """The highest learning rate, reached at the end of the warm-up; --lr-scaling may change it."""
    lr_scaling: Annotated[str, listed("What the global batch makes of --lr.", SCALINGS)] = "none"
    """A name of `training.config.choices.SCALINGS`."""
    optimizer: Annotated[str, listed("How the gradients change the weights.", OPTIMIZERS)] = "sgd"
    """A name of `training.config.choices.OPTIMIZERS`."""
    momentum: float = 0.9
    """SGD's momentum, or Adam's and AdamW's first beta."""
    nesterov: bool = False
    """Nesterov momentum for SGD."""
    weight_decay: float = 5e-4
    """Decay of weights; biases and norms do not decay."""
    decay_norm_and_bias: bool = False
    """Let biases and norms decay too."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises from almost zero to --lr."""
    lr_scheduler: Annotated[str, listed("The learning rate after the warm-up.", SCHEDULES)] = "cosine"
    """A name of `training.config.choices.SCHEDULES`."""
    lr_step_epochs: str = "30"
    """When schedule `step` lowers the learning rate: 30 is every 30 epochs, 150,225 are the epochs themselves."""
    lr_gamma: float = 0.1
    """What schedules `step` and `plateau` multiply the learning rate with."""
    plateau_patience: int = 10
    """Epochs without a lower validation loss that schedule `plateau` bears; after one more it lowers the rate."""
    early_stopping_patience: int = 0
    """Epochs without a higher validation accuracy after which the training ends; 0: it goes on to the last epoch."""
    max_hours: float = 0.0
    """Hours of training, all attempts together, after which it ends as if this were its last step; 0: any number."""
    clip_grad_norm: float = 0.0
    """Largest norm of the gradients of a step, which are scaled down to it; 0: they are not."""
    grad_accum_steps: int = 1
    """Parts that each rank computes its share of a batch in, one after the other, to save memory."""
    ema_decay: float = 0.0
    """Decay of the moving average of the weights that is evaluated and kept instead of them, such as 0.999; 0: none."""
    sync_bn: bool = False
    """Batch normalisation over the whole batch instead of each rank's share."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision: off, bfloat16, or float16 with a scaled loss."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What each rank holds: the whole state (DDP), or its part of it (FSDP2), for models too large for one GPU."""
    memory_format: Literal["channels-last", "contiguous"] = "channels-last"
    """How images and weights (of ddp) lie in memory: channels-last is what convolutions are fastest with."""
    compile: bool = False
    """Have torch compile the training's forward and backward passes, which takes a minute at each start."""
    static_graph: bool = False
    """Tell DDP that each step uses the same parameters in the same order, from which it can save time."""
    compress_gradients: Literal["none", "bf16"] = "none"
    """What gradients are rounded to on their way between the ranks: bf16 halves what is sent."""
    deterministic: bool = False
    """Allow operations only that give the same bits each time, also where that is slow; end if there is none."""
    crop: Literal["auto", "none", "padded", "resized"] = "auto"
    """Random crops: of the padded image, or of any part, scaled. `auto`: padded for data in memory, else resized."""
    flip: Literal["auto", "on", "off"] = "auto"
    """Mirror half of the images. `auto`: not those of IDX files (a mirrored digit is another)."""
    auto_augment: Literal["none", "autoaugment", "randaugment", "trivialaugment"] = "none"
    """Changes of color and shape: AutoAugment (ImageNet's or CIFAR-10's), RandAugment, or TrivialAugment."""
    random_erasing: float = 0.0
    """Probability that a random rectangle of an image is erased."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2; 0: no mixup. With --cutmix as well, each step uses either."""
    cutmix: float = 0.0
    """Alpha of cutmix, such as 1; 0: no cutmix."""
    seed: int = 0
    """The number that everything random follows from: weights, order, augmentation, the held-out part."""
    image_size: int | None = None
    """Side of the square images that the model sees; by default what suits the model and the data."""
    eval_image_size: int | None = None
    """The same in evaluations, where larger images are recognised better than in training; by default --image-size."""
    val_split: float = 0.05
    """Part of the training set that is held out for validation, if the data have no val/ of their own."""
    max_corrupt_images: int = 10
    """Unreadable images that are replaced by others; with more the run ends."""
    data_on_device: Literal["auto", "on", "off"] = "auto"
    """Hold all images, as bytes, in each rank's GPU, and augment them there: packed data, IDX and CIFAR files, without
    a --auto-augment. `auto`: if they take less than a tenth of its free memory."""
    num_workers: int | None = None
    """Loader processes per rank; by default the cores that the rank has, or none where images cost nothing to make."""
    log_every: int = 20
    """Steps between two lines of metrics."""
    checkpoint_every: str = "10m"
    """Steps (500) or time (30s, 10m, 2h) between two checkpoints; each epoch's end is saved anyway."""
    snapshot_every: str = "auto"
    """Steps (50) or time (2s) between two snapshots, copies of the state in each node's memory that a crash starts
    again from. `auto`: about a second, or longer where they would take 1 % of the speed; `off`: none."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest ones."""
    log_samples: bool = False
    """Write down which images are in each step: each rank's in a file below metrics/samples."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UserError: names the flag, its value and what to use instead.
        """
        for field in dataclasses.fields(self):
            _check_choice(field.name, getattr(self, field.name))
        for name, (accepts, fix) in _RULES.items():
            _check_rule(name, getattr(self, name), accepts, fix)
        for name in WORDS:
            parse_interval(name, getattr(self, name))
        parse_drops(self.lr_step_epochs)
        check_combinations(self)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_LARGEST_SEED = 2**63 - 1

# field: (what it accepts, what to use instead)
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data": (lambda v: isinstance(v, str), f"give a directory, or {FASHION_MNIST}"),
    "model": (lambda v: isinstance(v, str) and v != "", f"give {SMALL_CNN} or a torchvision model such as resnet50"),
    "weights": (lambda v: v is None or (isinstance(v, str) and v != ""), "give a file or a name, or leave it out"),
    "head_hidden": (lambda v: _is_whole(v, 0), "use 0 or more"),
    "epochs": (lambda v: _is_whole(v, 1), "use 1 or more"),
    "batch_size": (lambda v: _is_whole(v, 1), "use 1 or more (images of all ranks together)"),
    "lr": (lambda v: _is_number(v) and v > 0, "use a number above 0"),
    "momentum": (lambda v: _is_number(v) and 0 <= v < 1, "use 0 or more and less than 1"),
    "weight_decay": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "label_smoothing": (lambda v: _is_number(v) and 0 <= v < 1, "use 0 or more and less than 1"),
    "lr_step_epochs": (lambda v: isinstance(v, str), "use a number such as '30', or epochs such as '150,225'"),
    "lr_gamma": (lambda v: _is_number(v) and 0 < v < 1, "use more than 0 and less than 1"),
    "plateau_patience": (lambda v: _is_whole(v, 0), "use 0 or more epochs"),
    "early_stopping_patience": (lambda v: _is_whole(v, 0), "use 0 or more epochs"),
    "max_hours": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "clip_grad_norm": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "grad_accum_steps": (lambda v: _is_whole(v, 1), "use 1 or more"),
    "ema_decay": (lambda v: _is_number(v) and 0 <= v < 1, "use 0 or more and less than 1, such as 0.999"),
    "random_erasing": (lambda v: _is_number(v) and 0 <= v <= 1, "use a probability from 0 to 1"),
    "mixup": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "cutmix": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "max_corrupt_images": (lambda v: _is_whole(v, 0), "use 0 or more"),
    "warmup_epochs": (lambda v: _is_number(v) and v >= 0, "use 0 or more"),
    "seed": (lambda v: _is_whole(v, 0) and v <= _LARGEST_SEED, f"use a whole number from 0 to {_LARGEST_SEED}"),
    "image_size": (lambda v: v is None or _is_whole(v, 8), "use 8 or more pixels, or leave it out"),
    "eval_image_size": (lambda v: v is None or _is_whole(v, 8), "use 8 or more pixels, or leave it out"),
    "val_split": (lambda v: _is_number(v) and 0 <= v < 1, "use 0 or more and less than 1"),
    "num_workers": (lambda v: v is None or _is_whole(v, 0), "use 0 or more, or leave it out"),
    "log_every": (lambda v: _is_whole(v, 1), "use 1 or more steps"),
    "checkpoint_every": (lambda v: isinstance(v, str), "use steps such as '500', or a duration such as '10m'"),
    "snapshot_every": (
        lambda v: isinstance(v, str),
        "use 'auto', 'off', steps such as '50', or a duration such as '2s'",
    ),
    "keep_checkpoints": (lambda v: _is_whole(v, 1), "use 1 or more"),
}


def _check_rule(name: str, value: Any, accepts: Callable[[Any], bool], fix: str) -> None:
    if not accepts(value):
        raise UserError(f"{flag(name)} is {value!r}: {fix}")


_NAMED = {"optimizer": OPTIMIZERS, "lr_scheduler": SCHEDULES, "lr_scaling": SCALINGS}


def _check_choice(name: str, value: Any) -> None:
    kind = _field_types()[name]
    known = get_args(kind) if get_origin(kind) is Literal else tuple(_NAMED.get(name, ()))
    if known and value not in known:
        raise UserError(f"{flag(name)} is {value!r}: use one of {', '.join(known)}")


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def to_argv(config: TrainConfig) -> list[str]:
    """The flags that `python -m training` parses back to an equal config. Fields that are None are left out."""
    values = dataclasses.asdict(config)
    switches = [flag(name) for name, value in values.items() if value is True]
    return switches + [f"{flag(name)}={value}" for name, value in values.items() if type(value) not in {bool, NoneType}]


def samples_per_group(config: TrainConfig) -> int:
    """Images that stand next to each other in a batch and must go to the same rank: mixing takes pairs."""
    return 2 if config.mixup or config.cutmix else 1


def check_world(config: TrainConfig, world_size: int, samples: int | None = None) -> None:
    """Make sure that every rank has work in every part of a step.

    Args:
        config: says how large a batch is, and how it is parted.
        world_size: the number of ranks.
        samples: images in the training set, if that is known: a batch is no larger.

    Raises:
        UserError: there are too few images in a batch.
    """
    least = world_size * config.grad_accum_steps * samples_per_group(config)
    among = f"the {world_size} ranks that share it"
    among += f" in {config.grad_accum_steps} parts each" if config.grad_accum_steps > 1 else ""
    among += ", in pairs to be mixed" if samples_per_group(config) > 1 else ""
    if config.batch_size < least:
        raise UserError(f"--batch-size is {config.batch_size}, too small for {among}: use {least} or more")
    if samples is not None and samples < least:
        fix = "fewer ranks" + (" or a smaller --grad-accum-steps" if config.grad_accum_steps > 1 else "")
        raise UserError(f"--data has {samples} training images, too few for {among}: use {fix}")
