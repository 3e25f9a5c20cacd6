"""TrainConfig: every training flag, its default and its help. RankOptions: the options of one rank.

Runs on the login node (before anything is queued) and on every rank. Imports neither torch nor torchvision, which take
seconds and may not be installed on a login node. Ranks that a node agent starts get
resolved flags (`training.config.classifier_program`); for ranks started by hand, files may add some
(`training.config.command_line`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from hpc.base.errors import UserError
from hpc.base.flags import Flag
from training.config import rules
from training.config.model_names import SMALL_CNN

Optimizer = Literal["sgd", "adamw", "adam"]
LrScheduler = Literal["cosine", "step", "plateau", "constant"]
Interpolation = Literal["bilinear", "bicubic"]
LrScaling = Literal["none", "sqrt", "linear"]
SCALE_BATCH = 256
"""Batch size to which --lr applies with --lr-scaling."""
_DEFAULT_BATCH = 512
# The number of parts of a training in which images have one size.
_PARTS = 5
# For _DEFAULT_BATCH images and more; docs/how-to/image-classifier.md has the measurements.
_DEFAULT_LR: dict[Optimizer, float] = {"sgd": 0.15, "adamw": 0.001, "adam": 0.001}
_SCALINGS: dict[LrScaling, Callable[[float], float]] = {"none": lambda _: 1.0, "sqrt": math.sqrt, "linear": float}


@dataclass(frozen=True, kw_only=True)
class Adjustable:
    """Image-classifier training (not with -- script.py): the flags that hpc resume may set.

    They change when the training ends and how it runs, but no step. hpc resume refuses --epochs with --lr-scheduler
    cosine, whose learning rates depend on the number of epochs, and with --initial-image-size.
    """

    TITLE = "image classifier"

    epochs: int = 8
    """Passes over the training set."""
    early_stopping_patience: int = 0
    """End the training when the validation accuracy has not improved for this number of epochs. 0: never."""
    max_hours: float = 0.0
    """End the training after this number of hours in all attempts together, and test the model. 0: no limit."""
    max_corrupt_images: int = 10
    """Number of corrupt images that the training may replace by others. If there are more, the run fails."""
    num_workers: int | None = None
    """Loader processes per rank. Default: the CPU cores per rank, at most 32; 0 for data in memory."""
    log_every: int = 20
    """Number of steps between two lines of metrics."""
    checkpoint_every: Annotated[str, Flag(metavar="N|TIME")] = "10m"
    """Steps (500) or time (30s, 10m, 2h) between checkpoints. There is also one at the end of each epoch."""
    snapshot_every: Annotated[str, Flag(metavar="N|TIME")] = "auto"
    """Steps (50) or time (2s) between snapshots, which each node keeps in memory to resume from after a crash.
    - off: no snapshots
    - auto: every half second, or less often, so that snapshots take at most 1 % of the time
    """
    keep_checkpoints: int = 2
    """Number of checkpoints to keep: the newest ones."""
    checkpoint_activations: bool = False
    """Recompute the blocks of the model in the backward pass, which saves memory and changes no result."""
    log_samples: bool = False
    """Log which images each step uses, in one file per rank in metrics/samples."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Adjustable):
    """Image-classifier training (not with -- script.py)."""

    data: Annotated[str, Flag(metavar="PATH")] = ""
    """Directory of images, packed images, IDX or CIFAR files; or fashion-mnist (Debian's copy), or digits.
    Default: fashion-mnist if it is installed, otherwise --recipe digits."""
    synthetic: bool = False
    """Train on generated images instead of --data, to measure the speed without loading data from files."""
    model: Annotated[str, Flag(metavar="NAME")] = SMALL_CNN
    """small-cnn or resnet20 (32, 44, 56, 110) for small images; torchvision's, such as resnet50; or timm:NAME."""
    weights: Annotated[str | None, Flag(metavar="PATH|NAME")] = None
    """Initial weights: a .safetensors or .pth file, or a name in torchvision's cache, such as IMAGENET1K_V1.
    If the number of classes differs, the classification head is initialised randomly. Default: random."""
    freeze_backbone: bool = False
    """Train only the classification head. All other layers keep the weights and batch statistics of --weights."""
    head_hidden: int = 0
    """Width of an additional hidden layer in the classification head. 0: no such layer."""
    batch_size: int = _DEFAULT_BATCH
    """Global batch: images per step on all ranks together."""
    lr: float | None = None
    """Highest learning rate. Default: 0.15 (sgd), 0.001 (adam, adamw); less for batches below 512 images."""
    lr_scaling: LrScaling = "none"
    """Whether the learning rate grows with the global batch.
    - none: --lr is used as it is
    - sqrt: --lr is for a batch of 256 images and grows with the square root of --batch-size
    - linear: --lr is for a batch of 256 images and grows with --batch-size (Goyal et al., 2017)
    """
    optimizer: Optimizer = "sgd"
    """Optimizer.
    - sgd: SGD with momentum
    - adamw: Adam with decoupled weight decay (Loshchilov and Hutter, 2019)
    - adam: Adam with L2 regularization (Kingma and Ba, 2015)
    """
    momentum: float = 0.9
    """Momentum of SGD; beta1 of Adam and AdamW."""
    nesterov: bool = False
    """Use Nesterov momentum with --optimizer sgd."""
    weight_decay: float = 5e-4
    """Weight decay. Only --decay-norm-and-bias includes biases, norms and embeddings."""
    decay_norm_and_bias: bool = False
    """Apply --weight-decay to biases, norms and embeddings, too."""
    layer_decay: float = 1.0
    """Multiply a layer's learning rate by this factor for each block between the layer and the classification head,
    such as 0.75 for fine-tuning (Clark et al., 2020; Bao et al., 2021). 1: all layers have the same learning rate."""
    loss: Literal["cross-entropy", "bce"] = "cross-entropy"
    """Training loss.
    - cross-entropy: cross entropy of the softmax over all classes
    - bce: mean of each class's binary cross entropy; a mixed image counts for both its classes (Wightman et al., 2021)
    """
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes in the loss.
    - none: all classes have the same weight
    - balanced: weights are inversely proportional to the classes' numbers of training images
    """
    label_smoothing: float = 0.0
    """Part of each target that is spread evenly over all classes, such as 0.1. 0: no label smoothing."""
    warmup_epochs: float = 1.0
    """Number of epochs in which the learning rate rises linearly from almost zero to --lr."""
    lr_scheduler: LrScheduler = "cosine"
    """Learning rate after the warm-up.
    - cosine: falls to --min-lr along half a cosine
    - step: is multiplied by --lr-gamma at --lr-step-epochs
    - plateau: is multiplied by --lr-gamma after --plateau-patience epochs without a lower validation loss
    - constant: stays at --lr
    """
    min_lr: float = 0.0
    """Learning rate at the end of --lr-scheduler cosine."""
    lr_step_epochs: Annotated[str, Flag(metavar="N[,N...]")] = "30"
    """Epochs at which --lr-scheduler step lowers the learning rate: 30 (every 30 epochs), or a list: 150,225. They are
    counted from the start of the training, with the warm-up."""
    lr_gamma: float = 0.1
    """Factor by which --lr-scheduler step and plateau lower the learning rate."""
    plateau_patience: int = 10
    """Epochs after the warm-up without a lower validation loss after which --lr-scheduler plateau lowers the rate."""
    clip_grad_norm: float = 0.0
    """Clip the norm of the gradients to this value. 0: no clipping."""
    grad_accum_steps: int = 1
    """Split each step into this number of forward and backward passes (gradient accumulation), to save memory."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999. The average is then what is evaluated and
    saved as the model. 0: no average."""
    sync_bn: bool = False
    """Compute the statistics of batch normalization over all ranks together (torch's SyncBatchNorm). Needs GPUs."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Automatic mixed precision with bfloat16 or float16."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How the model is distributed.
    - ddp: each rank holds the whole model
    - fsdp: each rank holds a shard of the model (FSDP2), for models that are too large for one GPU
    """
    compile: bool = False
    """Compile the model with torch.compile. It takes about a minute at the first start; later ones reuse the code."""
    compress_gradients: Literal["none", "bf16"] = "none"
    """Round gradients to bfloat16 (bf16) for the all-reduce, which halves the traffic."""
    deterministic: Literal["off", "warn", "error"] = "warn"
    """Whether an interrupted training ends with the same bits as an uninterrupted one.
    - off: not ensured; cuDNN tries out the fastest algorithms at each start
    - warn: ensured if devices and number of ranks stay the same; the log lists operations that are not deterministic
    - error: as warn, but such an operation ends the training before its first step
    """
    tf32: bool = False
    """Compute float32 matrix products in TF32 on GPUs that support it: faster, but with a fraction of 10 bits."""
    crop: Literal["auto", "none", "padded", "resized"] = "auto"
    """Random crops.
    - auto: padded for IDX and CIFAR files and digits, resized for all other data
    - none: no random crops
    - padded: crops of the image's size from the image with a padded border
    - resized: crops of random size and shape, resized to --image-size (RandomResizedCrop)
    """
    crop_scale: Annotated[str, Flag(metavar="MIN,MAX")] = "0.25,1"
    """Smallest and largest area of a resized crop as parts of the image's area. Szegedy et al. (2015) use 0.08,1."""
    flip: Literal["auto", "on", "off"] = "auto"
    """Random horizontal flips. auto: on, except for IDX files and digits, because mirroring changes digits."""
    auto_augment: Literal["none", "autoaugment", "randaugment", "trivialaugment"] = "none"
    """Policy that changes color and shape: AutoAugment (for ImageNet or CIFAR-10), RandAugment or TrivialAugment."""
    auto_augment_interpolation: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """Interpolation with which --auto-augment rotates, shears and shifts images. torchvision's published ImageNet
    trainings use bilinear."""
    randaugment_magnitude: int = 9
    """Strength of --auto-augment randaugment, from 0 to 30."""
    color_jitter: float = 0.0
    """Change brightness, contrast and saturation by random factors between 1 - VALUE and 1 + VALUE, such as 0.4.
    0: no change."""
    random_erasing: float = 0.0
    """Probability of erasing a random rectangle of an image."""
    repeated_augmentation: int = 1
    """Number of copies of each image in a batch, each augmented differently (Hoffer et al., 2020), such as 4.
    An epoch keeps its number of steps, and so uses a part of the images: a quarter of them with 4."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2. 0: no mixup. With --mixup and --cutmix, each step uses one of the two."""
    cutmix: float = 0.0
    """Alpha of cutmix, such as 1. 0: no cutmix. With --mixup and --cutmix, each step uses one of the two."""
    seed: int = 0
    """Random seed."""
    image_size: int | None = None
    """Side in pixels of the square images that the model is trained on. Default: chosen by the model and the data."""
    initial_image_size: int | None = None
    """Side in pixels of the images in the first fifth of the epochs, such as 128. It grows with each fifth, and is
    --image-size in the last one (progressive resizing), so that the training takes less time. Default: --image-size."""
    eval_image_size: int | None = None
    """Side in pixels of the images in evaluations. A larger one often raises the accuracy. Default: --image-size."""
    eval_crop_pct: Annotated[str, Flag(metavar="PART")] = "0.875"
    """Side of the centre crop in evaluations as a part of the resized image's shorter side, as a number or a fraction:
    0.875, 224/232. Images of IDX and CIFAR files are not cropped."""
    interpolation: Interpolation = "bilinear"
    """Interpolation with which images are resized, in training and in evaluations."""
    val_split: float = 0.05
    """Part of the training set to hold out for validation if --data has no val/ directory."""
    data_on_device: Literal["auto", "off"] = "auto"
    """Keep all images of IDX or CIFAR files in the memory of each rank's GPU, and augment them on the GPU.
    - auto: if they take less than a tenth of the GPU's free memory; not with --auto-augment, --color-jitter or --crop
      resized
    - off: never
    """

    def __post_init__(self) -> None:
        """Refuse values that cannot work (`training.config.rules.check`)."""
        rules.check(self)
        if self.min_lr > (highest := highest_learning_rate(self)):
            raise UserError(f"--min-lr is {self.min_lr}, more than the highest learning rate: use {highest:g} or less")


def highest_learning_rate(config: TrainConfig) -> float:
    """Return `--lr` or its default, scaled with the global batch size."""
    lr = config.lr
    if lr is None:
        batch_size = config.batch_size if config.lr_scaling == "none" else SCALE_BATCH
        lr = _DEFAULT_LR[config.optimizer] * math.sqrt(min(1.0, batch_size / _DEFAULT_BATCH))
    return lr * _SCALINGS[config.lr_scaling](config.batch_size / SCALE_BATCH)


def needs_compiler(train: TrainConfig) -> bool:
    """Return whether the trainer uses torch's compiler, or a part of torch that cannot do without it."""
    return train.compile or train.strategy == "fsdp" or train.checkpoint_activations


def training_sizes(config: TrainConfig, size: int) -> list[int]:
    """Return the sides of the training images in the fifths of the epochs. In the last fifth, it is `size`.

    With --initial-image-size it grows, by multiples of 4 pixels: progressive resizing, as by Howard for DAWNBench
    (2018).
    """
    first = size if config.initial_image_size is None else config.initial_image_size
    growth = (size - first) / (_PARTS - 1)
    return [*(min(size, first + round(growth * part / 4) * 4) for part in range(_PARTS - 1)), size]


def size_in_epoch(config: TrainConfig, size: int, epoch: int) -> int:
    """Return the side of the training images in an epoch, counted from 0. In the last epoch it is `size`."""
    is_last = epoch >= config.epochs - 1
    return training_sizes(config, size)[_PARTS - 1 if is_last else epoch * _PARTS // config.epochs]


def samples_per_group(config: TrainConfig) -> int:
    """Return how many consecutive images of a batch must go to the same rank: 2 with mixup or cutmix, else 1."""
    return 2 if config.mixup or config.cutmix else 1


def check_world(config: TrainConfig, world_size: int, samples: int | None = None) -> None:
    """Check that every rank has images in every micro-batch of a step.

    Raises UserError if a batch, or the training set (`samples`, None if not known), has too few images.
    """
    minimum = world_size * config.grad_accum_steps * samples_per_group(config)
    among = f"the {world_size} ranks that share it"
    among += f" in {config.grad_accum_steps} parts each" if config.grad_accum_steps > 1 else ""
    among += ", in pairs to be mixed" if samples_per_group(config) > 1 else ""
    if config.batch_size < minimum:
        raise UserError(f"--batch-size is {config.batch_size}, too small for {among}: use {minimum} or more")
    if samples is not None and samples < minimum:
        fix = "fewer ranks" + (" or a smaller --grad-accum-steps" if config.grad_accum_steps > 1 else "")
        raise UserError(f"--data has {samples} training images, too few for {among}: use {fix}")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The options of one rank."""

    train: TrainConfig
    recipe: str | None = None
    run_dir: Path = Path("runs/standalone")
    """Directory of all files that the run writes."""
    attempt: int = 1
    """Number of this attempt at the run."""
    node_dir: Path | None = None
    """Directory in this node's memory for snapshots and heartbeats, which outlive the ranks."""
    resolved: bool = False
    """Whether all flags are resolved, so that neither those of --recipe nor a data set are added."""
    fault: Annotated[str, Flag(metavar="POINT@STEP:RANK")] = ""
    """For tests: the fault to inject, POINT@STEP:RANK (training.runtime.fault_injection). Also TORCHRELAY_FAULT."""
