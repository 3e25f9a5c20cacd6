"""Turns a run's spec back into flags, to submit the run again with changes or to show its command line.

Pure; runs on the login node.
"""

from typing import Any

from hpc.base import program
from hpc.programs.program_kinds import program_of_run
from hpc.run.spec import RunSpec


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the flags, by name, with which `hpc submit` repeats a run. The run's name and script are left out."""
    own = program.values_of(program_of_run(spec))
    own.pop("recipe", None)  # its flags are among the others
    return {
        "cluster": spec.cluster,
        **own,
        **program.values_of(spec.resources, spec.recovery, spec.network, spec.notification),
        "stage-dir": spec.stage_dir, "stage-keep": spec.stage_keep, "stage-timeout": spec.stage_timeout,
        "device": "cpu" if spec.device == "cpu" else "auto", "stage-env": bool(spec.stage_env),
        "python": spec.python, "container": spec.container,
    }  # fmt: skip


def adaptable_settings_of(spec: RunSpec) -> dict[str, Any]:
    """Like `settings_of`, but a time limit that submit chose is None, because another partition has another default."""
    return settings_of(spec) | ({"time": None} if spec.has_default_time else {})
