"""Turns the values of flags back into the words of a command line. Pure; runs everywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc.base import program
from hpc.base.units import Word


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the types of JSON and YAML."""
    return {
        name: str(value) if isinstance(value, Path | Word) else list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


def changed(settings: Mapping[str, Any], options: type[Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults of `options`, in the types of JSON and YAML."""
    defaults = plain(program.default_values(options))
    return {name: value for name, value in plain(settings).items() if value != defaults[name]}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with these settings. Their values have the types that `changed` returns."""
    words = list[str]()
    for name, value in settings.items():
        several = value if isinstance(value, list) else [value]
        switch = {True: f"--{name}", False: f"--no-{name}"}
        words += [switch[value]] if isinstance(value, bool) else [f"--{name}={item}" for item in several]
    return words
