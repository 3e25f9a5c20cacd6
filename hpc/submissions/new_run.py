"""Makes the run directory, queues the run and prints the answer; leaves no run behind if Slurm refuses. Login node.

With --dry-run, prints the job and its expected start instead.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.base.errors import NotNowError, TorchrelayError, UserError
from hpc.base.files import new_directory, remove_directory, write_atomic
from hpc.base.git import is_listed_as_untracked, listed_files
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.events.kinds import Submitted, Submitting
from hpc.run.events.ledger import EventWriter
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.services.tracking.opening import at_trackers
from hpc.slurm import client as slurm
from hpc.slurm import handover
from hpc.slurm.executor import SlurmExecutor, agent_command, start_local
from hpc.sources.python_environment import this_environment
from hpc.submissions.options import SubmitOptions
from hpc.submissions.plan import check_place, code_of, plan, warn
from hpc.submissions.user_code.code_copy import copy_code
from hpc.submissions.user_code.own_code import UserCode
from hpc.submissions.user_code.script_hints import code_line, hints
from hpc.submissions.user_python import environment_archive


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run that was submitted or, in a dry run, could be."""

    run: RunDir
    spec: RunSpec
    code: UserCode
    hints: Sequence[str]
    """What the script tells (`script_hints`); once the job is queued, no file of the user is read."""
    job_id: str | None = None

    @property
    def answer(self) -> dict[str, Any]:
        """The document of `hpc submit --json`."""
        script = str(self.run.script) if self.spec.cluster == "slurm" else None
        return {
            "run": self.run.name, "run_dir": str(self.run.path), "job_id": self.job_id, "cluster": self.spec.cluster,
            "script": script,
        }  # fmt: skip


def start_run(
    options: SubmitOptions,
    fill: Callable[[RunDir, RunSpec], RunSpec] = lambda _, spec: spec,
    code: UserCode | None = None,
) -> NewRun:
    """Check the flags, make the run directory, and submit; a dry run only checks.

    `fill` adds initial content to the new directory, such as a checkpoint (`hpc fork`), and returns the spec that
    records it. `code` is the user's code; None means the code of the current directory.

    Raises:
        UserError: a flag is wrong, or Slurm refuses the job.
        TorchrelayError: Slurm or a tracker does not answer.
    """
    # Nobody but the user may write to the files of the run (hpc.run.ownership). The job inherits this umask.
    os.umask(os.umask(0) | 0o022)
    run, spec = plan(options)
    code = code or code_of(options)
    spec = dataclasses.replace(
        spec, program=code.program if code.script else spec.program, working_directory=code.working_directory,
        in_place=str(code.root) if code.in_place else None,
    )  # fmt: skip
    check_place(run, spec)
    warn(options, spec, code)
    new = NewRun(run=run, spec=spec, code=code, hints=hints(code, spec))
    environment = this_environment() if options.stage_env else None
    if options.dry_run:
        return new
    if environment is not None:
        archive = environment_archive.find_or_make(environment, run.path.parent)
        spec = dataclasses.replace(spec, stage_env=str(archive))
    spec, job_id = _submit(run, spec, code, fill)
    _hide_runs_from_git(run)
    return dataclasses.replace(new, spec=spec, job_id=job_id)


def _submit(
    run: RunDir, spec: RunSpec, code: UserCode, fill: Callable[[RunDir, RunSpec], RunSpec]
) -> tuple[RunSpec, str]:
    """Make the run directory and queue the run. Returns its spec and the job's id.

    A killed submission leaves a complete directory or none; `hpc resume` submits a complete one that has no job.
    """
    grace_seconds = preemption_grace(spec)
    with at_trackers(run, spec) as known:
        with new_run_directory(run) as draft:
            draft.events.mkdir()
            draft.logs.mkdir()
            spec = fill(draft, known)
            spec.save(draft)
            copy_code(draft, code)
            executor = SlurmExecutor(run, spec) if spec.cluster == "slurm" else None
            if executor:
                executor.prepare(draft)
            # This claim to submit the run is written before other processes can see the directory.
            _events(draft).append(Submitting(cluster=spec.cluster, **handover.this_process()))
        try:
            job_id = executor.start() if executor else start_local(run)
        except (UserError, OSError) as error:
            # After other errors, such as Ctrl-C, the directory stays, because a queued job may need it.
            remove_directory(run.path)
            if isinstance(error, OSError):
                raise _cannot_write(run, error) from error
            raise
    if executor:
        submitted = Submitted(
            job_id=job_id, cluster=spec.cluster, stop_lead_seconds=spec.stop_lead_seconds, grace_seconds=grace_seconds,
            excluded=tuple(executor.excluded),
        )  # fmt: skip
        _events(run).append(submitted)
        with suppress(OSError):  # the job is queued, whether stderr can be written or not
            for note in executor.notes:
                print(f"torchrelay: {note}", file=sys.stderr)
    return spec, job_id


def _events(run: RunDir) -> EventWriter:
    return EventWriter(run.events / "submit.jsonl")


@contextmanager
def new_run_directory(run: RunDir) -> Iterator[RunDir]:
    """Yield a private directory, which becomes the run directory when the `with` block ends. An error removes it.

    Raises UserError if the directory cannot be made, or if the run exists when the block ends.
    """
    try:
        with new_directory(run.path) as path:
            yield RunDir(path)
    except FileExistsError as error:
        raise UserError(f"run {run.name!r} exists already in {run.path.parent}: choose another --name") from error
    except OSError as error:
        raise _cannot_write(run, error) from error


def _cannot_write(run: RunDir, error: OSError) -> NotNowError:
    return NotNowError(f"--runs-dir {run.path.parent} is not writable: {error}")


def _hide_runs_from_git(run: RunDir) -> None:
    """Make git ignore the run, unless it does already. A failure only prints a warning."""
    runs_dir = run.path.parent
    try:
        if is_listed_as_untracked(run.path):
            write_atomic((runs_dir if _has_only_runs(runs_dir) else run.path) / ".gitignore", "*\n")
    except (OSError, TorchrelayError) as error:
        print(f"hpc submit: warning: git does not ignore {run.path}: {error}", file=sys.stderr)


def _has_only_runs(directory: Path) -> bool:
    """Return whether a directory has nothing that git tracks, nor a visible entry that is not ours."""
    if any(os.path.lexists(directory / name) for name in (".git", ".gitignore")) or listed_files(directory):
        return False
    if cli.find_group(str(directory), directory):
        return True
    entries = (entry for entry in directory.iterdir() if not entry.name.startswith("."))
    return all(RunDir(entry).spec.exists() or cli.find_group(str(entry), directory) for entry in entries)


def preemption_grace(spec: RunSpec) -> int | None:
    """Return the seconds from SIGTERM to SIGKILL on preemption, or None if they are unknown.

    `hpc status` compares them with the time that a save takes.
    """
    if spec.cluster == "slurm" and spec.resources.partition is not None:
        with suppress(TorchrelayError):
            return slurm.grace_seconds(slurm.show_partition(spec.resources.partition), slurm.show_config())
    return None


# --- the answer ---


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


def _places(new: NewRun) -> list[str]:
    """Return sentences about a script's directory, its Python and its code; none for the classifier."""
    spec = new.spec
    if not spec.script:
        return []
    python = f"{spec.python or sys.executable}{f' of {spec.container}' if spec.container else ''}"
    start = f"{program_of(spec.script)} starts in {spec.start_directory(new.run)}, with {python}"
    return [visible(start), *code_line(new.code)]


def show(new: NewRun, options: SubmitOptions) -> int:
    """Print the submitted run, or the dry run. With --wait, wait for the run's end. Returns the exit code."""
    for hint in new.hints:
        print(f"hpc submit: {visible(hint)}", file=sys.stderr)
    if options.dry_run:
        show_dry_run(new, as_json=options.json)
        return 0
    if not options.json:
        announcement = options.program.announcement() if options.program else []  # an evaluation trains nothing
        print(*announcement, _first_line(new), *(f"  {line}" for line in _places(new)), sep="\n")
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
    cpus = len(os.sched_getaffinity(0))
    machine = f"this machine, {os.uname().nodename} ({cpus} CPU{'s' if cpus > 1 else ''})"
    return f"started run {run.name} on {machine}, as process {new.job_id}{where}"
