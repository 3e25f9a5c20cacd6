"""The settings of a run by the names of their flags: to submit it again with others, or to show what a person types.

Pure; runs on the login node.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc.base import program
from hpc.run.spec import RunSpec
from hpc.submit.options import SubmitOptions, SubmitTraining


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the settings with which `hpc submit` makes a run again, without its name and its script."""
    own = {"data": spec.data, "include": spec.include, "in-place": bool(spec.in_place)}
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
    """Return `settings_of` without a time limit that submit has chosen: another partition has another default."""
    return settings_of(spec) | ({"time": None} if spec.has_default_time else {})


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON and YAML hold them."""
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


def changed(settings: Mapping[str, Any], options: type[SubmitOptions] = SubmitTraining) -> dict[str, Any]:
    """Return the settings that are not the defaults of `options`, as JSON and YAML hold them."""
    defaults = plain(program.default_values(options))
    return {name: value for name, value in plain(settings).items() if value != defaults[name]}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the words by which a person gives settings that are not the defaults."""
    words = list[str]()
    for name, value in settings.items():
        several = value if isinstance(value, list) else [value]
        words += [f"--{name}"] if value is True else [f"--{name}={item}" for item in several]
    return words
