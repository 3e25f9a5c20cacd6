"""The YAML file of `--config`: flags and their values, one per line. Runs on the login node."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpc.errors import UserError


def with_config(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """Put the flags of a `--config` file before those of the command line, so that the latter win.

    `known` are the names that may stand in the file; True for switches, which take no value.

    Raises:
        UserError: the file cannot be read, is no mapping, or holds what is no flag.
    """
    positions = [
        i for i, argument in enumerate(arguments) if argument == "--config" or argument.startswith("--config=")
    ]
    if not positions:
        return arguments
    last = positions[-1]
    path = Path(arguments[last].partition("=")[2] or next(iter(arguments[last + 1 :]), ""))
    try:
        return [*flags_of(_load(path), known), *arguments]
    except UserError as error:
        raise UserError(f"--config {path}{error}") from error


def _load(path: Path) -> dict[Any, Any]:
    try:
        # As text, which tyro parses as it does a command line's: YAML itself would make 43200 of a time of 12:00:00.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 - text alone
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f" cannot be read: {error}") from error
    if not isinstance(loaded, dict | None):
        raise UserError(" is no mapping: write lines such as `batch-size: 256`")
    return loaded or {}


def flags_of(settings: Mapping[Any, Any], known: Mapping[str, bool]) -> list[str]:
    """The flags that a file's settings stand for: `batch-size: 256` is `--batch-size=256`."""
    flags = []
    for key, value in settings.items():
        flag = str(key).replace("_", "-")
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else "see hpc submit --help"
            raise UserError(f": there is no flag {key!r}: {hint}")
        if isinstance(value, dict):
            raise UserError(f": {key} is a mapping: give one value, or a list for --sbatch")
        flags += _as_flags(flag, value, switch=known[flag])
    return flags


def _as_flags(flag: str, value: Any, *, switch: bool) -> list[str]:
    if not switch:
        return [f"--{flag}={item}" for item in (value if isinstance(value, list) else [value]) if item != ""]
    if value not in {"true", "false"}:
        raise UserError(f": {flag} is {value!r}: write true or false")
    return [f"--{flag}"] if value == "true" else []
