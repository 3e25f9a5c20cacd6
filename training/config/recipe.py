"""Recipes: the flags of trainings that are known to work, by name. Imports no torch.

Each is a small YAML file that can be copied and given with `--config`; its first line says what it is for.
"""

import difflib
from functools import cache
from pathlib import Path

from hpc.core.errors import UserError

_DIRECTORY = Path(__file__).with_name("recipes")


@cache
def recipes() -> dict[str, str]:
    """What each recipe is for, by its name."""
    return {path.stem: _first_line(path) for path in sorted(_DIRECTORY.glob("*.yaml"), key=lambda path: path.stem)}


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").rstrip(".\n")


def recipe_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        UserError: there is none of this name.
    """
    if name not in recipes():
        close = difflib.get_close_matches(name, recipes(), n=3, cutoff=0.5) or list(recipes())
        raise UserError(f"--recipe is {name!r}, which is not known: use {', '.join(close)}")
    return _DIRECTORY / f"{name}.yaml"
