"""Parses the command line of `python -m training` and of programs with the same flags, wherever they run.

Flags also come from YAML files: `--config FILE.yaml`, and recipes (`--recipe NAME`). Ranks that a node agent starts
get resolved flags (`training.config.classifier_program`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.flag_files import flag_names, read_settings, with_files
from hpc.base.flags import Flag
from hpc.base.program import changed, words_of
from hpc.base.text import similar
from training.config.dataset_layout import DIGITS, FASHION_MNIST, FASHION_MNIST_DIRECTORY, find_data
from training.config.model_names import check_model
from training.config.train_config import RankOptions, TrainConfig

_RECIPES = Path(__file__).with_name("recipes")


# --- recipes ---


@cache
def recipes() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """Return the path of a recipe's file. Raises UserError if no recipe has this name."""
    if name not in recipes():
        close = similar(name, recipes()) or recipes()
        raise UserError(f"--recipe is {name!r}, which is not known: use {', '.join(close)}")
    return _RECIPES / f"{name}.yaml"


def preset(settings: Mapping[str, Any], known: Mapping[str, bool]) -> dict[str, Any]:
    """Return the flags of the recipe that the settings of a training name. If they name no data, choose a data set.

    The data set is Fashion-MNIST if Debian's copy is installed, else scikit-learn's digits with their recipe. Raises
    UserError if the recipe does not exist, or has a flag that is not in `known`.
    """
    if recipe := settings.get("recipe"):
        return read_settings("--recipe", recipe_path(recipe), known)
    if {"data", "synthetic"} & settings.keys():
        return {}
    if FASHION_MNIST_DIRECTORY.is_dir():
        return {"data": FASHION_MNIST}
    return {"recipe": DIGITS, **read_settings("--recipe", recipe_path(DIGITS), known)}


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

    Raises UserError if a flag is wrong, or no model has the given name.
    """
    known = flag_names(TrainConfig)
    typed = program.read((options,), argv, prog)
    parsed = program.build(options, with_files(typed, known, {}, lambda settings: preset(settings, known)))
    check_model(parsed.train.model)
    return parsed


def train_words(train: TrainConfig) -> list[str]:
    """Return the flags of a training that differ from their defaults, as words of a command line."""
    return words_of(changed(program.values_of(train), TrainConfig))


def rank_options(argv: Sequence[str]) -> RankOptions:
    """Return the options of a rank that a node agent has started, with the directory of the data on its node.

    Raises UserError if a flag is of another version.
    """
    options = program.build(RankOptions, program.read((RankOptions,), argv, "training"))
    train = options.train
    return replace(options, train=replace(train, data=str(find_data(Path(train.data))))) if train.data else options
