"""What becomes of flags beside other flags, and beside the data: some exclude each other, some change nothing.

What changes nothing is said and not refused: a recipe or a file may bring it. Pure; imports no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpc.core.errors import UserError
from training.config.choices import flag
from training.config.dataset_layout import FASHION_MNIST
from training.config.model_names import SMALL_CNN

if TYPE_CHECKING:
    # It hands these functions on, and must not wait for itself.
    from training.config.train_config import TrainConfig

Test = Callable[[Any], bool]

# (what does not go together, why and what to use)
_CONFLICTS: tuple[tuple[Test, str], ...] = (
    (lambda c: not (c.data or c.synthetic), f"--data is missing: give a directory, {FASHION_MNIST}, or --synthetic"),
    (
        lambda c: c.head_hidden > 0 and c.model.startswith("squeezenet"),
        "--head-hidden does not go with SqueezeNets, which end with a convolution: use 0, or another --model",
    ),
    (
        lambda c: c.freeze_backbone and c.weights is None,
        "--freeze-backbone keeps all but the head as it begins: give --weights too",
    ),
    (
        lambda c: c.data_on_device == "on" and c.auto_augment != "none",
        "--data-on-device on does not go with --auto-augment, which runs on the CPU: leave out either",
    ),
    (
        lambda c: c.compile and c.sync_bn,
        "--compile does not go with --sync-bn, in the middle of whose layers the ranks talk: leave out either",
    ),
    (lambda c: c.strategy == "fsdp" and c.amp == "fp16", "--strategy fsdp does not scale losses: use --amp bf16"),
)
_NOT_WITH_FSDP = ("ema_decay", "sync_bn", "compile", "static_graph", "compress_gradients")
# (a field, when it counts, why it does not otherwise)
_COUNTS: tuple[tuple[str, Test, str], ...] = (
    ("lr_step_epochs", lambda c: c.lr_scheduler == "step", "it is for --lr-scheduler step"),
    (
        "lr_gamma",
        lambda c: c.lr_scheduler in {"step", "plateau"},
        "it is for --lr-scheduler step and --lr-scheduler plateau",
    ),
    ("plateau_patience", lambda c: c.lr_scheduler == "plateau", "it is for --lr-scheduler plateau"),
    (
        "early_stopping_patience",
        lambda c: c.early_stopping_patience < c.epochs - 1,
        "there are too few --epochs to end before the last",
    ),
    ("nesterov", lambda c: c.optimizer == "sgd" and c.momentum > 0, "it is for --optimizer sgd with --momentum"),
    ("decay_norm_and_bias", lambda c: c.weight_decay > 0, "--weight-decay is 0"),
    ("eval_image_size", lambda c: not c.synthetic, "generated images are not evaluated"),
    ("sync_bn", lambda c: c.model != SMALL_CNN, f"{SMALL_CNN} has no batch normalisation"),
)
# What follows the validation.
_LISTENERS: tuple[tuple[Test, str], ...] = (
    (lambda c: c.early_stopping_patience > 0, "--early-stopping-patience {config.early_stopping_patience}"),
    (lambda c: c.lr_scheduler == "plateau", "--lr-scheduler plateau"),
)


def check_combinations(config: "TrainConfig") -> None:
    """Refuse flags that do not go together.

    Raises:
        UserError: names them.
    """
    for conflict, fix in _CONFLICTS:
        if conflict(config):
            raise UserError(fix)
    for name in _NOT_WITH_FSDP if config.strategy == "fsdp" else ():
        if getattr(config, name) != getattr(type(config), name):
            raise UserError(f"--strategy fsdp does not go with {flag(name)}: leave out either")


def without_effect(config: "TrainConfig") -> list[str]:
    """The flags that are not as they are by default and still change nothing, with the reason: a line for each."""
    changed = [entry for entry in _COUNTS if getattr(config, entry[0]) != getattr(type(config), entry[0])]
    told = [f"{_typed(config, name)} changes nothing: {why}" for name, counts, why in changed if not counts(config)]
    if config.warmup_epochs > config.epochs:
        told.append(f"--warmup-epochs {config.warmup_epochs:g} is more than --epochs: --lr is not reached")
    return told


def _typed(config: "TrainConfig", name: str) -> str:
    value = getattr(config, name)
    return flag(name) if value is True else f"{flag(name)} {value}"


def check_validation(config: "TrainConfig", *, validates: bool) -> None:
    """Refuse what listens to the validation where there is none.

    Raises:
        UserError: names the flag.
    """
    listener = next((told.format(config=config) for listens, told in _LISTENERS if listens(config)), None)
    if listener and not validates:
        fix = "leave out --synthetic" if config.synthetic else "use --val-split 0.1, or add val/"
        raise UserError(f"{listener} follows the validation, and there is none: {fix}")
