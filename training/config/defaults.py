"""Reads the default flags of the site and of the user from YAML files. Runs on the login node."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import platformdirs

from hpc.base.errors import UserError
from training.config import command_line

_FILE = "torchrelay.yaml"
_SITE = Path("/etc") / _FILE


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Default values of flags from one file, by the names of the flags."""

    source: str
    settings: Mapping[str, Any]


def files() -> tuple[Path, ...]:
    """Return the paths of the site's and the user's file, which may not exist."""
    return _SITE, platformdirs.user_config_path() / _FILE


def read(known: Mapping[str, bool] | None = None) -> list[Defaults]:
    """Return the defaults in the existing files, the site's first. If `known` is given, they may set only its flags.

    Raises UserError if a file cannot be read, or has an unknown flag or a recipe.
    """
    paths = [path for path in files() if os.path.lexists(path)]
    settings = [command_line.read_settings("defaults", path, known) for path in paths]
    all_defaults = [Defaults(source=str(path), settings=of_file) for path, of_file in zip(paths, settings, strict=True)]
    for defaults in all_defaults:
        if "recipe" in defaults.settings:
            raise UserError(
                f"defaults {defaults.source}: a recipe cannot be a default: write its flags into the file instead, or "
                f"type --recipe {defaults.settings['recipe']}"
            )
    return all_defaults


def merge(defaults: list[Defaults]) -> dict[str, Any]:
    """Merge defaults. Later ones, such as the user's, replace earlier ones."""
    return reduce(command_line.overlay, (of_file.settings for of_file in defaults), {})
