"""The command that submits a run again. Pure; runs on the login node."""

import shlex

from hpc.base.program import changed, values_of, words_of
from hpc.programs.program_kinds import EvaluationTask, settings_of
from hpc.run.spec import Resources, RunSpec
from hpc.submissions.options import submit_flags


def submit_command(spec: RunSpec, task: EvaluationTask | None = None) -> list[str]:
    """Return the words of a command that submits the run again, with all settings that differ from their defaults."""
    if task:
        flags = [task.source, f"--checkpoint={task.checkpoint}"]
        # Do not name the evaluated run's own data: from data that --data names, `hpc evaluate` holds nothing out.
        flags += [f"--data={spec.data}"] if spec.data and task.other_data else []
        flags += [] if task.split == "auto" else [f"--split={task.split}"]
        flags += [f"--cluster={spec.cluster}", *words_of(changed(values_of(spec.resources), Resources))]
        return ["python", "-m", "hpc.evaluate", *flags]
    script = ["--", *spec.script] if spec.script else []
    settings = changed(settings_of(spec), submit_flags(spec.script))
    return ["python", "-m", "hpc.submit", *words_of(settings), *script]


def shell_text(command: list[str]) -> str:
    """Return the command for a shell, one flag per line. The user's script and its arguments share a line."""
    program, words = " ".join(command[:3]), [shlex.quote(word) for word in command[3:]]
    if "--" in words:
        start = words.index("--")
        words = [*words[:start], " ".join(words[start:])]
    return " \\\n  ".join([" ".join([program, *words[:1]]), *words[1:]])
