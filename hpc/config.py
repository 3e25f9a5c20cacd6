"""The YAML file of `--config`: flags and their values, one per line. Runs on the login node."""

import difflib
from collections.abc import Iterable
from pathlib import Path

import yaml

from hpc.errors import UserError


def with_config(arguments: list[str], known: Iterable[str]) -> list[str]:
    """Put the flags of a `--config` file before those of the command line, so that the latter win.

    `known` are the names that may stand in the file.

    Raises:
        UserError: the file cannot be read, is no mapping, or nests.
    """
    positions = [
        i for i, argument in enumerate(arguments) if argument == "--config" or argument.startswith("--config=")
    ]
    if not positions:
        return arguments
    last = positions[-1]
    path = Path(arguments[last].partition("=")[2] or next(iter(arguments[last + 1 :]), ""))
    return [*flags_of(path, sorted(known)), *arguments]


def flags_of(path: Path, known: list[str]) -> list[str]:
    """The flags that a YAML file stands for: `batch-size: 256` is `--batch-size=256`."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path} is no mapping: write lines such as `batch-size: 256`")
    flags = []
    for key, value in loaded.items():
        flag = str(key).replace("_", "-")
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else "see hpc submit --help"
            raise UserError(f"--config {path}: there is no flag {key!r}: {hint}")
        if isinstance(value, dict):
            raise UserError(f"--config {path}: {key} is a mapping: give one value, or a list for --sbatch")
        flags += _as_flags(flag, value)
    return flags


def _as_flags(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    if value is None:
        return []
    return [f"--{flag}={item}" for item in (value if isinstance(value, list) else [value])]
