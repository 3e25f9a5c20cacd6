"""`hpc submit --dry-run`: show what would be sent, and Slurm's answer. Runs on the login node."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hpc import cli
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.notification.recipients import choose_recipients
from hpc.slurm.executor import SlurmExecutor, agent_command
from hpc.spec import RunSpec, program_of


def show_dry_run(run: RunDir, spec: RunSpec, answer: Mapping[str, object], *, as_json: bool) -> None:
    """Ask Slurm when the job would start, and print the script; without Slurm, print the command.

    Raises:
        UserError: sbatch would refuse the job.
    """
    notes, expected = list[str](), None
    if spec.cluster == "slurm":
        executor = SlurmExecutor(run, spec)
        text, expected = executor.script(), executor.estimate_start()
        notes.append(
            f"Slurm expects to start it at {expected.time} on {expected.nodes}"
            if expected
            else f"Slurm does not say when it would start: type sinfo for the nodes of {spec.resources.partition} that "
            "are out of service"
        )
    else:
        text = agent_command(run) + "\n"
    if spec.script:
        notes.append(starting_place(run, spec))
    names = [Path(path).name for path in (*spec.after, *spec.after_ok)]
    if names:
        notes.append(f"it begins after {', '.join(f'run {visible(name)}' for name in names)}")
    if spec.python:
        of = f" of {visible(spec.container)}" if spec.container else ""
        notes.append(f"torchrun and the ranks start in {visible(spec.python)}{of}")
    told = choose_recipients(spec.notification.notify)
    if told:
        notes.append(f"notifies {', '.join(f'{name} ({service})' for name, service in told.items())}")
    if as_json:
        start = asdict(expected) if expected else None
        shown = {"text": text, "python": spec.python, "container": spec.container, "notify": list(told)}
        cli.print_json({**answer, **shown, "expected_start": start})
    else:
        print(text, end="")
    for note in notes:
        print(f"hpc submit: {note}", file=sys.stderr)


def starting_place(run: RunDir, spec: RunSpec) -> str:
    """Return a sentence that names the working directory of a user's script."""
    return f"{visible(program_of(spec.script))} starts in {visible(str(spec.start_directory(run)))}"
