"""The command line of `python -m training` and of the programs that take the same flags. Runs where they run.

Ranks that a node agent starts read `spec.json` instead (`training.config.rank_options`): this module imports tyro and
YAML, which takes a quarter of a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from hpc.core import program
from training.config.config_file import flag_names, recipes, with_config
from training.config.model_names import check_model
from training.config.rank_options import RankOptions
from training.config.train_config import TrainConfig

# Characters of help that names may take before their lines of help.
_WIDEST = 60
Options = TypeVar("Options")


def listed(question: str, table: Mapping[str, str]) -> Any:
    """The help of a flag whose values are the names of a table: a line for each."""
    lines = [question, *(f"{name}: {text}" for name, text in table.items())]
    names = "|".join(table)
    return tyro.conf.arg(help="\n".join(lines), metavar=names if len(names) <= _WIDEST else "NAME")


# What `--recipe` takes, wherever flags are read.
RecipeName = Annotated[str | None, listed("The flags of a training that is known to work.", recipes())]


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RankOptions):
    """Train an image classifier with all ranks that torchrun started, or alone.

    Resumes from the newest checkpoint in the run directory. On SIGTERM and SIGUSR2 it saves and stops.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""


def parse_flags(options: type[Options], argv: Sequence[str], prog: str, *, prints: bool = True) -> Options:
    """Parse a command line that holds training flags.

    Args:
        options: a dataclass with a TrainConfig as its field `train`.
        argv: the arguments.
        prog: what to call the program in its help.
        prints: False on ranks other than 0, which print no help.

    Raises:
        UserError: a flag is wrong, or no model has the given name.
    """
    parsed = program.parse(options, with_config(list(argv), flag_names(TrainConfig)), prog, prints=prints)
    check_model(parsed.train.model)  # type: ignore[attr-defined]  # the field that every caller's dataclass has
    return parsed
