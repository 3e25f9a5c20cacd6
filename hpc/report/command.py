"""A run's settings, and the command that submits it again. Pure; runs on the login node."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc.base.flag_words import changed, words_of
from hpc.base.program import values_of
from hpc.programs.kinds import EvaluationTask, program_of_run
from hpc.run.spec import Resources, RunSpec
from hpc.submissions.options import submit_flags
from hpc.submissions.settings import settings_of

_OF_ONE_RUN = frozenset({"name", "id", "mlflow-run", "has-default-time"})


def submit_command(spec: RunSpec, task: EvaluationTask | None) -> list[str]:
    """Return the words of a command that submits the run again, with all settings that differ from their defaults."""
    if task is not None:
        return _evaluate_command(spec, task)
    script = ["--", *spec.script] if spec.script else []
    settings = changed(settings_of(spec), submit_flags(spec.script))
    return ["python", "-m", "hpc.submit", *words_of(settings), *script]


def _evaluate_command(spec: RunSpec, task: EvaluationTask) -> list[str]:
    """Return the words of a command that repeats an evaluation, without settings that come from the evaluated run."""
    flags = [task.source, *([f"--checkpoint={task.checkpoint}"] if task.checkpoint else [])]
    # Do not name the evaluated run's own data: from data that --data names, `hpc evaluate` holds nothing out.
    flags += [f"--data={spec.data}"] if spec.data and (task.other_data or task.checkpoint is None) else []
    flags += [] if task.split == "auto" else [f"--split={task.split}"]
    flags += [f"--cluster={spec.cluster}", *words_of(changed(values_of(spec.resources), Resources))]
    return ["python", "-m", "hpc.evaluate", *flags]


def shell_text(command: list[str]) -> str:
    """Return the command for a shell, one flag per line. The user's script and its arguments share a line."""
    program, words = " ".join(command[:3]), [shlex.quote(word) for word in command[3:]]
    if "--" in words:
        start = words.index("--")
        words = [*words[:start], " ".join(words[start:])]
    return " \\\n  ".join([" ".join([program, *words[:1]]), *words[1:]])


def flat_settings(spec: RunSpec) -> dict[str, str]:
    """Return every setting of a run by its flag's name."""
    settings = {**asdict(spec), **values_of(program_of_run(spec)), "data": spec.data, "script": spec.script}
    del settings["program"]
    nested = dict[str, Any]()
    for group in ("resources", "recovery", "network"):
        nested |= settings.pop(group)
    merged = {**settings, **nested}
    found = dict[str, str]()
    for name, value in merged.items():
        words = value if isinstance(value, list | tuple) else [] if value is None else [value]
        found[name.replace("_", "-")] = " ".join(map(str, words))
    return found


def settings_with_defaults(spec: RunSpec) -> dict[str, str]:
    """Return the settings to compare with another run's. Unset ones are `default`, except `lr`: it is computed."""
    settings = {name: value for name, value in flat_settings(spec).items() if name not in _OF_ONE_RUN}
    checkpoint = Path(spec.forked_from) if spec.forked_from else None
    settings["forked-from"] = f"{checkpoint.parents[1].name}, {checkpoint.name}" if checkpoint else "none"
    return {name: value or "default" for name, value in settings.items()}
