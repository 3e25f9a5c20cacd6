"""Parses the command line of `python -m training` and of programs with the same flags, wherever they run.

Flags also come from YAML files: `--config FILE.yaml`, and recipes (`--recipe NAME`). Ranks that a node agent starts
read `spec.json` instead (`training.config.training_spec`), which takes less time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.flags import Flag
from hpc.base.text import did_you_mean, similar
from training.config.dataset_layout import DIGITS, FASHION_MNIST, FASHION_MNIST_DIRECTORY
from training.config.model_names import check_model
from training.config.train_config import RankOptions, TrainConfig

_REPEATABLE = {"sbatch", "setup"}
_RECIPES = Path(__file__).with_name("recipes")


# --- flags from files ---


@cache
def recipes() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """Return the path of a recipe's file.

    Raises:
        UserError: no recipe has this name.
    """
    if name not in recipes():
        close = similar(name, recipes()) or recipes()
        raise UserError(f"--recipe is {name!r}, which is not known: use {', '.join(close)}")
    return _RECIPES / f"{name}.yaml"


def flag_names(options: type[Any]) -> dict[str, bool]:
    """Return the names of a dataclass's flags, without leading dashes, and whether each flag is a switch."""
    return {program.flag_name(field): field.type is bool for field in program.flags(options)}


def with_files(
    given: Mapping[str, Any], known: Mapping[str, bool], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Add flags from the files of `--config` and `--recipe`, and from `defaults`, to the given flags.

    Of several values of a flag, the first in this order counts: given, `--config`, `--recipe`, `defaults`. Lists are
    joined. The file of `--config` may name a recipe. Files may set only flags in `known` (`flag_names`). Defaults of
    other flags are ignored.

    Raises:
        UserError: a file cannot be read or has an unknown flag, or the recipe does not exist.
    """
    config = given.get("config")
    settings = {} if config is None else read_settings("--config", Path(config), known)
    if recipe := given.get("recipe") or settings.get("recipe"):
        settings = overlay(read_settings("--recipe", recipe_path(recipe), known), settings)
    settings = overlay({name: value for name, value in (defaults or {}).items() if name in known}, settings)
    return overlay({name: value for name, value in settings.items() if value not in ("", [""])}, given)


def with_data(given: Mapping[str, Any], known: Mapping[str, bool]) -> dict[str, Any]:
    """Add a data set if the flags of a training name neither data nor a recipe.

    The data set is Fashion-MNIST if Debian's copy is installed, else scikit-learn's digits with their recipe.
    """
    if {"data", "synthetic", "recipe"} & given.keys():
        return dict(given)
    if FASHION_MNIST_DIRECTORY.is_dir():
        return {"data": FASHION_MNIST, **given}
    return overlay(with_files({"recipe": DIGITS}, known), given)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings. Values in `over` replace those in `base`, but a list is appended to the values in `base`."""
    both = base.keys() & {name for name, value in over.items() if isinstance(value, list)}
    return {**base, **over, **{name: [*_listed(base[name]), *over[name]] for name in both}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_settings(flag: str, path: Path, known: Mapping[str, bool] | None) -> dict[str, Any]:
    """Return the settings in a YAML file by the names of flags: `batch_size: 256` sets `--batch-size`.

    Raises:
        UserError: the file cannot be read, or has a flag that is not in `known`. If `known` is None, any may be set.
    """
    import yaml  # noqa: PLC0415  # most command lines need no file

    where = f"{flag} {path}"
    try:
        # Read all values as text, like a command line: YAML would turn the time 12:00:00 into 43200.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 - text alone
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not isinstance(loaded, dict | None):
        raise UserError(f"{where} is not a mapping: write lines such as `batch-size: 256`")
    settings = {}
    for key, value in (loaded or {}).items():
        name = str(key).replace("_", "-")
        if known is not None and name not in {*known, "recipe"}:
            hint = did_you_mean(name, known, "hpc submit --help-all lists the flags")
            raise UserError(f"{where}: there is no flag {key!r}: {hint}")
        # Refuse nested lists: with YAML aliases, a small file can hold more text than fits in memory.
        if not all(isinstance(each, str) for each in _listed(value)):
            raise UserError(f"{where}: {key} is nested: give one value, or a list for --sbatch and --setup")
        if known and known.get(name) and value not in {"true", "false"}:
            raise UserError(f"{where}: {name} is {value!r}: write true or false")
        settings[name] = [value] if name in _REPEATABLE and isinstance(value, str) else value
    return settings


# --- parsing ---


# The type of `--recipe` in all programs.
RecipeName = Annotated[
    str | None,
    Flag(
        help=f"Flags of a training that is known to work: {', '.join(recipes())} (docs/how-to/image-classifier.md).",
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The training flags, from the command line and files."""

    train: TrainConfig
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainFlags, RankOptions):
    """Train an image classifier, with one process or under torchrun.

    Resumes from the newest checkpoint in the run directory. On SIGTERM and SIGUSR2 it saves and stops.
    """


Options = TypeVar("Options", bound=TrainFlags)


def parse_flags(options: type[Options], argv: Sequence[str], prog: str) -> Options:
    """Parse a command line with training flags, or print the help and exit.

    Raises:
        UserError: a flag is wrong, or no model has the given name.
    """
    known, given = flag_names(TrainConfig), program.read((options,), argv, prog)
    parsed = program.build(options, with_data(with_files(given, known), known))
    check_model(parsed.train.model)
    return parsed
