"""Prints the answer of a submission: the run or, with --dry-run, its job and expected start. Runs on the login node."""

import sys
from dataclasses import asdict

from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.slurm.executor import SlurmExecutor, agent_command
from hpc.submissions.new_run import NewRun
from hpc.submissions.options import SubmitOptions
from hpc.submissions.resources import this_machine
from hpc.submissions.user_code.script_hints import code_line, hints


def show_dry_run(new: NewRun, *, as_json: bool) -> None:
    """Print the batch script and the start that Slurm expects; for a run on this machine, print the command.

    Raises:
        UserError: sbatch would refuse the job.
    """
    run, spec, notes, expected = new.run, new.spec, list[str](), None
    if spec.cluster == "slurm":
        executor = SlurmExecutor(run, spec)
        text, expected = executor.script(), executor.estimate_start()
        notes += executor.notes
        notes.append(
            f"Slurm expects to start it at {expected.time} on {expected.nodes}"
            if expected
            else f"Slurm does not say when it would start: type sinfo for the nodes of {spec.resources.partition} that "
            "are out of service"
        )
    else:
        text = agent_command(run) + "\n"
    notes += _places(new)
    if as_json:
        start = asdict(expected) if expected else None
        shown = {"text": text, "python": spec.python, "container": spec.container, "expected_start": start}
        cli.print_json({**new.answer, **shown})
    else:
        print(text, end="")
    for note in notes:
        print(f"hpc submit: {note}", file=sys.stderr)


def starting_place(run: RunDir, spec: RunSpec) -> str:
    """Return a sentence with a user's script, its directory, its Python and the image of that Python."""
    image = f" of {spec.container}" if spec.container else ""
    python = f"{spec.python or sys.executable}{image}"
    return visible(f"{program_of(spec.script)} starts in {spec.start_directory(run)}, with {python}")


def _places(new: NewRun) -> list[str]:
    """Return sentences about a script's place and its code; none for the classifier."""
    return [starting_place(new.run, new.spec), *code_line(new.code)] if new.spec.script else []


def show(new: NewRun, options: SubmitOptions) -> int:
    """Print the submitted run, or the dry run. With --wait, wait for the run's end. Returns the exit code."""
    for hint in hints(new.code, new.spec):
        print(f"hpc submit: {visible(hint)}", file=sys.stderr)
    if options.dry_run:
        show_dry_run(new, as_json=options.json)
        return 0
    if not options.json:
        print(*options.program.announcement(), _first_line(new), *(f"  {line}" for line in _places(new)), sep="\n")
        sys.stdout.flush()
    if options.wait:
        from hpc.status.printing import wait_for_end  # noqa: PLC0415 - loads rich, which only this needs

        return wait_for_end(new.run, new.answer if options.json else None)
    if options.json:
        cli.print_json(new.answer)
    else:
        print(f"  {new.run.path}")
        cli.print_next(new.run, "status", "logs --follow", "cancel")
    return 0


def _first_line(new: NewRun) -> str:
    run, spec = new.run, new.spec
    # With --gpus-per-node 0 on Slurm, the user expects the CPU and needs no note.
    on_cpu = spec.device != "cuda" and (spec.cluster == "local" or spec.resources.gpus_per_node.count > 0)
    where = "; its ranks use the CPU" if on_cpu else ""
    if spec.cluster == "slurm":
        return f"submitted run {run.name} as job {new.job_id}{where}"
    return f"started run {run.name} on {this_machine()}, as process {new.job_id}{where}"
