"""What becomes of flags beside other flags, and beside the data: some need a validation, some change nothing.

What changes nothing is said and not refused: a recipe or a file may bring it. Pure; imports no torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpc.errors import UserError
from training.choices import flag
from training.names import SMALL_CNN

if TYPE_CHECKING:
    # It hands these functions on, and must not wait for itself.
    from training.config import TrainConfig

Test = Callable[[Any], bool]

# (a field, when it counts, why it does not otherwise)
_COUNTS: tuple[tuple[str, Test, str], ...] = (
    ("drop_epochs", lambda c: c.schedule == "step", "it is for --schedule step"),
    ("drop_factor", lambda c: c.schedule in {"step", "plateau"}, "it is for --schedule step and --schedule plateau"),
    ("plateau_patience", lambda c: c.schedule == "plateau", "it is for --schedule plateau"),
    ("patience", lambda c: c.patience < c.epochs - 1, "there are too few --epochs to end before the last"),
    ("decay_all", lambda c: c.weight_decay > 0, "--weight-decay is 0"),
    ("sync_bn", lambda c: c.model != SMALL_CNN, f"{SMALL_CNN} has no batch normalisation"),
)
# What follows the validation.
_LISTENERS: tuple[tuple[Test, str], ...] = (
    (lambda c: c.patience > 0, "--patience {config.patience}"),
    (lambda c: c.schedule == "plateau", "--schedule plateau"),
)


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
        fix = "leave out --synthetic" if config.synthetic else "use --val-fraction 0.1, or add val/"
        raise UserError(f"{listener} follows the validation, and there is none: {fix}")
