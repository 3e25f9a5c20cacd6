"""Turns a run's spec back into flags, to submit the run again with changes or to show its command line.

Pure; runs on the login node.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc.base import program
from hpc.base.units import Word
from hpc.run.spec import RunSpec
from hpc.submissions.options import SubmitOptions, SubmitTraining


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the flags, by name, with which `hpc submit` repeats a run. The run's name and script are left out."""
    own = {"data": spec.data, "in-place": bool(spec.in_place)}
    return {
        "cluster": spec.cluster,
        **(program.values_of(spec.train) if spec.train else own),
        **program.values_of(spec.resources, spec.recovery, spec.network, spec.notification),
        "stage-dir": spec.stage_dir, "stage-keep": spec.stage_keep, "stage-timeout": spec.stage_timeout,
        **({} if spec.pack is None else {"pack": "on", "pack-size": spec.pack}),
        "device": "cpu" if spec.device == "cpu" else "auto", "stage-env": bool(spec.stage_env),
        "python": spec.python, "container": spec.container,
    }  # fmt: skip


def adaptable_settings_of(spec: RunSpec) -> dict[str, Any]:
    """Like `settings_of`, but a time limit that submit chose is None, because another partition has another default."""
    return settings_of(spec) | ({"time": None} if spec.has_default_time else {})


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the types of JSON and YAML."""
    return {
        name: str(value) if isinstance(value, Path | Word) else list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


def changed(settings: Mapping[str, Any], options: type[SubmitOptions] = SubmitTraining) -> dict[str, Any]:
    """Return the settings that differ from the defaults of `options`, in the types of JSON and YAML."""
    defaults = plain(program.default_values(options))
    return {name: value for name, value in plain(settings).items() if value != defaults[name]}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with these settings. Their values have the types that `changed` returns."""
    words = list[str]()
    for name, value in settings.items():
        several = value if isinstance(value, list) else [value]
        words += [f"--{name}"] if value is True else [f"--{name}={item}" for item in several]
    return words
