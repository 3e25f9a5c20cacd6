"""Flags from YAML files: `--config FILE.yaml`, and the recipes that come with Torchrelay (`--recipe NAME`).

A recipe holds the flags of a training that is known to work; its first line describes it. Runs on the login node, and
on ranks that were started by hand.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpc.core.errors import UserError
from training.config.flag_advice import advice_for, check_names

_DIRECTORY = Path(__file__).with_name("recipes")
_RECIPE = "recipe"


@cache
def recipes() -> dict[str, str]:
    """The description of each recipe, by its name."""
    return {path.stem: _first_line(path) for path in sorted(_DIRECTORY.glob("*.yaml"), key=lambda path: path.stem)}


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").rstrip(".\n")


def recipe_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        UserError: no recipe has this name.
    """
    if name not in recipes():
        close = difflib.get_close_matches(name, recipes(), n=3, cutoff=0.5) or list(recipes())
        raise UserError(f"--recipe is {name!r}, which is not known: use {', '.join(close)}")
    return _DIRECTORY / f"{name}.yaml"


def with_config(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """Put the flags of `--recipe` and of `--config` before those of the command line, so that the latter win.

    A file may name its recipe. `--no-NAME` on the command line takes back a switch that a file has turned on.

    Args:
        arguments: the command line.
        known: the flags that may stand in a file, without dashes; True for switches, which take no value.

    Raises:
        UserError: a file cannot be read or holds what is no flag, the recipe does not exist, or a flag of the command
            line has another name here.
    """
    check_names(arguments, known)
    config = _last_value(arguments, "--config")
    settings = _settings("--config", Path(config), known) if config is not None else {}
    named = settings.pop(_RECIPE, None)
    recipe = _last_value(arguments, "--recipe") or named
    if recipe:
        settings = _settings("--recipe", recipe_path(recipe), known) | settings
    off = {f"--no-{name}": name for name, switch in known.items() if switch}
    for argument in arguments:
        settings.pop(off.get(argument, ""), None)
    flags = [flag for name, value in settings.items() for flag in _as_flags(name, value, switch=known[name])]
    recipe_flag = [f"--{_RECIPE}={named}"] if named else []
    return [*recipe_flag, *flags, *(argument for argument in arguments if argument not in off)]


def flag_names(*owners: Any) -> dict[str, bool]:
    """The flags of dataclasses that may stand in a file; True for switches."""
    return {field.name.replace("_", "-"): field.type is bool for owner in owners for field in dataclasses.fields(owner)}


def _last_value(arguments: list[str], flag: str) -> str | None:
    """The value of the last occurrence of a flag; None if it does not occur."""
    positions = [i for i, argument in enumerate(arguments) if argument == flag or argument.startswith(f"{flag}=")]
    if not positions:
        return None
    last = positions[-1]
    return arguments[last].partition("=")[2] or next(iter(arguments[last + 1 :]), "")


def _settings(flag: str, path: Path, known: Mapping[str, bool]) -> dict[str, Any]:
    """The settings of a file, by the names of flags, checked."""
    try:
        return checked(_load(path), known)
    except UserError as error:
        raise UserError(f"{flag} {path}{error}") from error


def _load(path: Path) -> dict[Any, Any]:
    try:
        # As text, which tyro parses as it does a command line's: YAML itself would make 43200 of a time of 12:00:00.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 - text alone
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f" cannot be read: {error}") from error
    if not isinstance(loaded, dict | None):
        raise UserError(" is no mapping: write lines such as `batch-size: 256`")
    return loaded or {}


def checked(settings: Mapping[Any, Any], known: Mapping[str, bool]) -> dict[str, Any]:
    """The settings by the names of flags: `batch_size: 256` is that of `--batch-size`.

    Raises:
        UserError: a key is no flag, or its value cannot be a flag's.
    """
    found = {}
    for key, value in settings.items():
        flag = str(key).replace("_", "-")
        if flag not in {*known, _RECIPE}:
            raise UserError(f": there is no flag {key!r}: {_similar(flag, known)}")
        if isinstance(value, dict):
            raise UserError(f": {key} is a mapping: give one value, or a list for --sbatch")
        if known.get(flag) and value not in {"true", "false"}:
            raise UserError(f": {flag} is {value!r}: write true or false")
        found[flag] = value
    return found


def _similar(flag: str, known: Mapping[str, bool]) -> str:
    if advice := advice_for(flag, known):
        return advice
    close = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "see hpc submit --help"


def _as_flags(flag: str, value: Any, *, switch: bool) -> list[str]:
    if switch:
        return [f"--{flag}"] if value == "true" else []
    return [f"--{flag}={item}" for item in (value if isinstance(value, list) else [value]) if item != ""]
