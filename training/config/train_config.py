"""TrainConfig: every training flag, its default and its help. RankOptions: what one rank runs.

Runs on the login node (before anything is queued) and on every rank. Imports neither torch nor torchvision, which take
seconds and may not be installed on a login node; nor tyro, so that ranks start quickly. Ranks that a node agent starts
read `spec.json`; a rank that was started by hand parses its command line (`training.config.command_line`).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpc.core.errors import UserError
from training.config import rules
from training.config.evaluation_task import EvaluationTask
from training.config.model_names import SMALL_CNN

Optimizer = Literal["sgd", "adamw", "adam"]
LrScheduler = Literal["cosine", "step", "one-cycle", "plateau", "constant"]
Interpolation = Literal["bilinear", "bicubic"]
LrScaling = Literal["none", "sqrt", "linear"]
SCALE_BATCH = 256
"""The batch size that --lr is for with --lr-scaling."""
_DEFAULT_BATCH = 512
# For _DEFAULT_BATCH images and more: docs/how-to/image-classifier.md has what was measured.
_DEFAULT_LR: dict[Optimizer, float] = {"sgd": 0.15, "adamw": 0.001, "adam": 0.001}
_SCALINGS: dict[LrScaling, Callable[[float], float]] = {"none": lambda _: 1.0, "sqrt": math.sqrt, "linear": float}


@dataclass(frozen=True, kw_only=True)
class Adjustable:
    """The training flags that change no step, but when the training ends and how it runs: `hpc resume` may set them.

    --epochs changes steps too if the learning rate depends on it (`training.config.changes`).
    """

    epochs: int = 8
    """Passes over the training set."""
    early_stopping_patience: int = 0
    """End the training after this many epochs without a higher validation accuracy; 0: never."""
    max_hours: float = 0.0
    """End the training after this many hours in all attempts together, as at its last step; 0: no limit."""
    max_corrupt_images: int = 10
    """Corrupt images that are replaced by others; with more, the run fails."""
    num_workers: int | None = None
    """Loader processes per rank. Default: the CPU cores per rank, or 0 for data in memory."""
    log_every: int = 20
    """Steps between two lines of metrics."""
    checkpoint_every: str = "10m"
    """Steps (500) or time (30s, 10m, 2h) between checkpoints. The end of each epoch is saved too."""
    snapshot_every: str = "auto"
    """Steps (50) or time (2s) between snapshots in each node's memory, from which a crash is resumed. `off`: none.
    `auto`: one second, or longer where snapshots would take 1 % of the time."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    checkpoint_activations: bool = False
    """Compute the blocks of the model again in the backward pass, to save memory; the bits are the same."""
    log_samples: bool = False
    """Log the images of each step, one file per rank in metrics/samples."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Adjustable):
    """The training flags."""

    data: str = ""
    """Directory of images, packed images, IDX or CIFAR files; or fashion-mnist (Debian's copy) or digits.
    Default: fashion-mnist if it is installed, otherwise --recipe digits."""
    synthetic: bool = False
    """Train on generated images instead of --data, to measure the speed without loading data."""
    model: str = SMALL_CNN
    """small-cnn, resnet20 (to 110: for small images), one of torchvision's, such as resnet50, or timm:NAME."""
    weights: str | None = None
    """Initial weights: a .safetensors or .pth file, or IMAGENET1K_V1 and others from torchvision's cache.
    A head for another number of classes is left out. Default: random."""
    freeze_backbone: bool = False
    """Train only the head; all other layers and their batch statistics keep --weights."""
    head_hidden: int = 0
    """Width of an additional hidden layer in the head; 0: none."""
    drop_path: float | None = None
    """Rate of stochastic depth of the last block; it rises from the first one. Default: the model's own."""
    batch_size: int = _DEFAULT_BATCH
    """Images per step on all ranks together (global batch)."""
    lr: float | None = None
    """Highest learning rate. Default: 0.15 (sgd), 0.001 (adam, adamw); less for batches below 512 images."""
    lr_scaling: LrScaling = "none"
    """Scale --lr with the global batch size.
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
    adam_beta2: float = 0.999
    """Beta2 of Adam and AdamW; vision transformers are often trained with 0.95."""
    nesterov: bool = False
    """Use Nesterov momentum (SGD)."""
    weight_decay: float = 5e-4
    """Weight decay. Biases, norms and embeddings have none without --decay-norm-and-bias."""
    decay_norm_and_bias: bool = False
    """Apply the weight decay to biases, norms and embeddings too."""
    layer_decay: float = 1.0
    """Multiply the learning rate by this for each block between a layer and the head, such as 0.75 in fine-tuning
    (Clark et al., 2020; Bao et al., 2021); 1: all layers have the same."""
    loss: Literal["cross-entropy", "bce"] = "cross-entropy"
    """Loss.
    - cross-entropy: of the classes together
    - bce: binary cross entropy, the mean over the classes; all classes of a mixed image count (Wightman et al., 2021)
    """
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes in the loss. `balanced`: in inverse proportion to their numbers of training images."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up from almost zero to --lr."""
    lr_scheduler: LrScheduler = "cosine"
    """Learning rate after the warm-up.
    - cosine: falls to --min-lr along half a cosine
    - step: is multiplied by --lr-gamma at --lr-step-epochs
    - one-cycle: rises from 1/25 over --warmup-epochs (usually a third of --epochs), falls to 1/250,000 along cosines
    - plateau: is multiplied by --lr-gamma after --plateau-patience epochs without a lower validation loss
    - constant: stays the same
    """
    min_lr: float = 0.0
    """Learning rate at the end of the cosine scheduler."""
    lr_step_epochs: str = "30"
    """Epochs at which the step scheduler lowers the learning rate: 30 for every 30 epochs, or a list: 150,225."""
    lr_gamma: float = 0.1
    """Factor of the step and plateau schedulers."""
    plateau_patience: int = 10
    """Patience of the plateau scheduler in epochs."""
    clip_grad_norm: float = 0.0
    """Clip the norm of the gradients to this value; 0: no clipping."""
    grad_accum_steps: int = 1
    """Gradient accumulation steps: forward and backward passes per optimizer step, to save memory."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights, which is evaluated and kept, such as 0.999; 0: none."""
    sync_bn: bool = False
    """Synchronize batch normalization over all ranks."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Automatic mixed precision."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Each rank holds the whole model (DDP), or a shard of it (FSDP2) for models too large for one GPU."""
    fsdp_sharding: Literal["full", "hybrid"] = "full"
    """FSDP shards the model over all ranks, or within each node (HSDP): more memory, less traffic between nodes."""
    memory_format: Literal["channels-last", "contiguous"] = "channels-last"
    """Memory layout of images, and of weights with --strategy ddp; channels-last is the fastest for convolutions."""
    compile: bool = False
    """Compile the model with torch.compile, which takes a minute at each start."""
    static_graph: bool = False
    """DDP's static_graph: every step uses the same parameters, which saves time."""
    compress_gradients: Literal["none", "bf16"] = "none"
    """Round gradients to bf16 for the all-reduce, which halves the traffic."""
    deterministic: Literal["off", "warn", "error"] = "warn"
    """Whether an interrupted training ends with the bits of an uninterrupted one.
    - off: the fastest algorithms, tried out at each start
    - warn: with the same devices and number of ranks; operations without a deterministic kernel are listed
    - error: an operation without a deterministic kernel ends the training before its first step
    """
    tf32: bool = False
    """Compute float32 products of matrices in TF32 on GPUs that have it: faster, with 10 bits of fraction."""
    crop: Literal["auto", "none", "padded", "resized"] = "auto"
    """Random crops: of the padded image, or resized crops. `auto`: padded for IDX and CIFAR files, else resized."""
    crop_scale: str = "0.25,1"
    """Least and greatest area of a resized crop, as parts of the image's; Szegedy et al. (2015) use 0.08,1."""
    crop_ratio: str = "3/4,4/3"
    """Least and greatest width by height of a resized crop."""
    flip: Literal["auto", "on", "off"] = "auto"
    """Random horizontal flips. `auto`: on, except for IDX files, because mirrored digits are others."""
    auto_augment: Literal["none", "autoaugment", "randaugment", "trivialaugment"] = "none"
    """Augmentation of color and shape: AutoAugment (ImageNet's or CIFAR-10's), RandAugment or TrivialAugment."""
    auto_augment_interpolation: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """How --auto-augment computes the pixels of rotated, sheared and shifted images; published ImageNet trainings of
    torchvision: bilinear."""
    randaugment_magnitude: int = 9
    """Strength of RandAugment, from 0 to 30. TrivialAugment draws another one for each image."""
    color_jitter: float = 0.0
    """Change brightness, contrast and saturation by random factors of at most 1 plus and at least 1 minus this, such as
    0.4; 0: none."""
    random_erasing: float = 0.0
    """Probability of erasing a random rectangle of an image."""
    repeated_augmentation: int = 1
    """Samples of an image in a batch, each augmented otherwise (Hoffer et al., 2020), such as 4: an epoch then has as
    many steps as before, and one image in 4."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2; 0: no mixup. With --cutmix too, each step uses one of them."""
    cutmix: float = 0.0
    """Alpha of cutmix, such as 1; 0: no cutmix."""
    seed: int = 0
    """Random seed."""
    image_size: int | None = None
    """Side of the model's square input images in pixels. Default: what suits the model and the data."""
    eval_image_size: int | None = None
    """Side of the input images in evaluations; a larger one often helps. Default: --image-size."""
    eval_crop_pct: str = "0.875"
    """Side of the centre crop in evaluations, as a part of the image's shorter side; torchvision's second weights for
    ResNet-50 are for 224/232. Images in memory are not cropped."""
    interpolation: Interpolation = "bilinear"
    """How images are resized, in training and in evaluations."""
    val_split: float = 0.05
    """Part of the training set held out for validation, if the data have no val/."""
    data_on_device: Literal["auto", "on", "off"] = "auto"
    """Keep all images of IDX or CIFAR files in the memory of each rank's GPU and augment them there, without
    --auto-augment, --color-jitter or --crop resized. `auto`: if they take less than a tenth of its free memory."""

    def __post_init__(self) -> None:
        """Refuse what cannot work: `training.config.rules.check`."""
        rules.check(self)
        if self.min_lr > (highest := highest_learning_rate(self)):
            raise UserError(f"--min-lr is {self.min_lr}, more than the highest learning rate: use {highest:g} or less")


def base_learning_rate(config: TrainConfig) -> float:
    """Return `--lr` or its default."""
    if config.lr is not None:
        return config.lr
    batch_size = config.batch_size if config.lr_scaling == "none" else SCALE_BATCH
    return _DEFAULT_LR[config.optimizer] * math.sqrt(min(1.0, batch_size / _DEFAULT_BATCH))


def highest_learning_rate(config: TrainConfig) -> float:
    """`--lr` or its default, scaled with the global batch size."""
    return base_learning_rate(config) * _SCALINGS[config.lr_scaling](config.batch_size / SCALE_BATCH)


def samples_per_group(config: TrainConfig) -> int:
    """Images that stand next to each other in a batch and must go to the same rank: mixing takes pairs."""
    return 2 if config.mixup or config.cutmix else 1


def check_world(config: TrainConfig, world_size: int, samples: int | None = None) -> None:
    """Make sure that every rank has work in every part of a step.

    Raises:
        UserError: there are too few images in a batch, which is no larger than the training set (`samples`, if known).
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
    """What one rank runs."""

    train: TrainConfig
    recipe: str | None = None
    run_dir: Path = Path("runs/standalone")
    """Directory of all files that the run writes."""
    attempt: int = 1
    """Number of this attempt at the run."""
    node_dir: Path | None = None
    """Directory in this node's memory for snapshots and heartbeats, which outlive the ranks."""
    fault: str = ""
    """For tests: the fault to inject, POINT@STEP:RANK (training.runtime.fault_injection). Also TORCHRELAY_FAULT."""


@dataclass(frozen=True, kw_only=True)
class SpecOptions(RankOptions):
    """What a rank runs that a node agent has started."""

    evaluation: EvaluationTask | None = None
    """The evaluation that it makes; None: it trains."""


def spec_argv(
    spec: Path, run_dir: Path, attempt: int, node_dir: Path, *, data: Path | None = None, fault: str = ""
) -> list[str]:
    """The arguments of `python -m training` for a rank that reads its flags from a file."""
    optional = {"data": data or "", "fault": fault}
    argv = [f"--spec={spec}", f"--run-dir={run_dir}", f"--attempt={attempt}", f"--node-dir={node_dir}"]
    return argv + [f"--{name}={value}" for name, value in optional.items() if value]


def is_from_spec(argv: Sequence[str]) -> bool:
    """Whether these are arguments as `spec_argv` makes them."""
    return bool(argv) and argv[0].startswith("--spec=")


def read_spec(argv: Sequence[str]) -> SpecOptions:
    """The options of a rank that a node agent starts, from the arguments that `spec_argv` made.

    Raises:
        OSError: the storage does not answer: another start may find it well.
        UserError: the file is no JSON, or has flags of another version.
    """
    given = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    try:
        spec = json.loads(Path(given["spec"]).read_bytes())
        train = TrainConfig(**spec["train"])
        evaluation = EvaluationTask(**spec["evaluation"]) if spec.get("evaluation") else None
    except ValueError as error:
        raise UserError(f"{given['spec']} cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{given['spec']} is damaged or from another version: {error!r}") from error
    return SpecOptions(
        evaluation=evaluation,
        train=replace(train, data=given["data"]) if "data" in given else train,
        recipe=spec.get("recipe"),
        run_dir=Path(given["run-dir"]),
        attempt=int(given["attempt"]),
        node_dir=Path(given["node-dir"]),
        fault=given.get("fault", ""),
    )
