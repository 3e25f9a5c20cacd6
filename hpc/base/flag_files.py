"""Reads flags from YAML files: from `--config FILE.yaml`, and the defaults of the site and of the user. Login node.

`python -m training` reads `--config` here, too.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import platformdirs

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.text import did_you_mean

_FILE = "torchrelay.yaml"
_REPEATABLE = {"sbatch", "setup"}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Default values of flags from one file, by the names of the flags."""

    source: str
    settings: Mapping[str, Any]


def flag_names(options: type[Any]) -> dict[str, bool]:
    """Return the names of a dataclass's flags, without leading dashes, and whether each flag is a switch."""
    return {program.flag_name(field): field.type is bool for field in program.flags(options)}


def with_files(
    typed: Mapping[str, Any],
    known: Mapping[str, bool],
    defaults: Mapping[str, Any],
    preset: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Add flags from the file of `--config`, from a preset, and from `defaults` to the typed flags.

    Of several values of a flag, the first in this order counts: typed, `--config`, preset, `defaults`. Lists are
    joined. The function `preset` gets the flags from all other sources. Files may set only flags in `known`
    (`flag_names`). Defaults of other flags are ignored.

    Raises:
        UserError: a file cannot be read or has an unknown flag.
    """
    config = typed.get("config")
    # A recipe is not a default: it is chosen for one run.
    file = {} if config is None else read_settings("--config", Path(config), {**known, "recipe": False})
    below = {name: value for name, value in defaults.items() if name in known}
    chosen = preset(_overlaid(below, file, typed))
    return overlay(_overlaid(below, chosen, file), typed)


def _overlaid(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings, of which later ones replace earlier ones. An empty value takes a flag back."""
    merged = reduce(overlay, layers, dict[str, Any]())
    return {name: value for name, value in merged.items() if value not in ("", [""])}


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
        if known is not None and name not in known:
            hint = did_you_mean(name, known, "hpc submit --help-all lists the flags")
            raise UserError(f"{where} cannot set {key!r}: {hint}")
        # Refuse nested lists: with YAML aliases, a small file can hold more text than fits in memory.
        if not all(isinstance(item, str) for item in _listed(value)):
            raise UserError(f"{where}: {key} is nested: give one value, or a list for --sbatch and --setup")
        if known and known.get(name) and value not in {"true", "false"}:
            raise UserError(f"{where}: {name} is {value!r}: write true or false")
        settings[name] = [value] if name in _REPEATABLE and isinstance(value, str) else value
    return settings


def default_files() -> tuple[Path, ...]:
    """Return the paths of the site's and the user's file of defaults, which may not exist."""
    return Path("/etc") / _FILE, platformdirs.user_config_path() / _FILE


def read_defaults(known: Mapping[str, bool] | None = None) -> list[Defaults]:
    """Return the defaults in the existing files, the site's first. If `known` is given, they may set only its flags.

    Raises:
        UserError: a file cannot be read, or has an unknown flag.
    """
    paths = [path for path in default_files() if os.path.lexists(path)]
    return [Defaults(source=str(path), settings=read_settings("defaults", path, known)) for path in paths]


def merge_defaults(defaults: list[Defaults]) -> dict[str, Any]:
    """Merge defaults. Later ones, such as the user's, replace earlier ones."""
    return reduce(overlay, (source.settings for source in defaults), dict[str, Any]())
