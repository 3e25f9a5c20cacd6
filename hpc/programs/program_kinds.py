"""Lists the kinds of programs that a run can have, and turns a run's spec back into flags. Runs on the login node."""

from collections.abc import Sequence
from typing import Any

from hpc.base import program
from hpc.base.errors import UserError
from hpc.programs.program_flags import ProgramFlags
from hpc.programs.script_flags import ScriptFlags
from hpc.run.spec import RunSpec
from training.config.classifier_program import ClassifierFlags, ClassifierRequest
from training.config.evaluation_task import EvaluationTask

__all__ = ["ClassifierRequest", "EvaluationTask"]  # for the modules that may not import the classifier's

DEFAULT = ClassifierFlags
"""The kind of program that `hpc submit` runs without `-- script.py`."""
KINDS: tuple[type[ProgramFlags], ...] = (ScriptFlags, ClassifierFlags)


def kind_for(script: Sequence[str]) -> type[ProgramFlags]:
    """Return the kind of program that a command line with these words after `--` submits."""
    return ScriptFlags if script else DEFAULT


def others(kind: type[ProgramFlags]) -> tuple[type[ProgramFlags], ...]:
    """Return the kinds of programs whose flags this kind does not have."""
    return tuple(other for other in KINDS if other is not kind)


def program_of_run(spec: RunSpec) -> ProgramFlags:
    """Return the flags of a run's program. Raises UserError if it is of another version of Torchrelay."""
    for kind in KINDS:
        if spec.program.built_in == kind.KIND:
            return kind.of_run(spec)
    raise UserError(f"run {spec.name} runs {spec.program.built_in}, which this version of torchrelay does not know")


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
