"""The YAML files of `--config` and `--recipe`: flags and their values, one per line.

Runs on the login node, and on ranks that were started by hand.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpc.core.errors import UserError
from training.config.recipe import recipe_path

_RECIPE = "recipe"


def with_config(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """Put the flags of a `--recipe` and of a `--config` file before those of the command line, so that the latter win.

    A file may name its recipe. `known` are the names that may stand in a file; True for switches, which take no value;
    `--no-NAME` takes back a switch that a file has turned on.

    Raises:
        UserError: a file cannot be read, is no mapping, or holds what is no flag; or there is no such recipe.
    """
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
    began = [f"--{_RECIPE}={named}"] if named else []
    return [*began, *flags, *(argument for argument in arguments if argument not in off)]


def flag_names(*owners: Any) -> dict[str, bool]:
    """The flags of dataclasses that may stand in a file; True for switches."""
    return {field.name.replace("_", "-"): field.type is bool for owner in owners for field in dataclasses.fields(owner)}


def _last_value(arguments: list[str], flag: str) -> str | None:
    """What follows the last of these flags; None: there is none."""
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
        UserError: one of them is no flag, or has no value that a flag could have.
    """
    found = {}
    for key, value in settings.items():
        flag = str(key).replace("_", "-")
        if flag not in {*known, _RECIPE}:
            close = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else "see hpc submit --help"
            raise UserError(f": there is no flag {key!r}: {hint}")
        if isinstance(value, dict):
            raise UserError(f": {key} is a mapping: give one value, or a list for --sbatch")
        if known.get(flag) and value not in {"true", "false"}:
            raise UserError(f": {flag} is {value!r}: write true or false")
        found[flag] = value
    return found


def _as_flags(flag: str, value: Any, *, switch: bool) -> list[str]:
    if switch:
        return [f"--{flag}"] if value == "true" else []
    return [f"--{flag}={item}" for item in (value if isinstance(value, list) else [value]) if item != ""]
