"""Continues a run that was cancelled, has failed, or is to train longer (`hpc resume`). Runs on the login node.

If Slurm refuses the job, the run's settings, code and results stay as they were. Only one process can resume a run: the
one that claims its next job (`hpc.slurm.handover`). Agents and supervisors claim jobs in the same way.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from torchrelay.checkpoint_files import list_checkpoints

from hpc.base import program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import remove_directory, write_atomic
from hpc.base.flags import INTERNAL
from hpc.base.program import plain
from hpc.base.text import visible
from hpc.commands import cli
from hpc.programs.program_flags import Begun
from hpc.programs.program_kinds import program_of_run, settings_of
from hpc.run.causes import Cause
from hpc.run.events.history import History
from hpc.run.events.kinds import Cancelled, CheckpointSaved, Resubmitted, Resumed, SnapshotSaved, TrainCompleted
from hpc.run.events.ledger import EventWriter, record_once
from hpc.run.events.resumption import next_resumption, resumption_file
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.services.notification.recipients import with_known_names
from hpc.slurm import bad_nodes, handover
from hpc.slurm.alive import job_of, wait_for_ending_job
from hpc.slurm.executor import SlurmExecutor, start_local
from hpc.slurm.predecessors import redirect_waiting_jobs
from hpc.submissions import checks
from hpc.submissions.new_run import preemption_grace
from hpc.submissions.options import JobFlags
from hpc.submissions.resources import complete
from hpc.submissions.user_code.code_copy import has_damaged_packages, prepare_code, replace_code, restore_code


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(JobFlags, cli.RunOptions):
    """Continue a run after hpc cancel or a failure, or train a complete one longer, from its newest saved state.

    Flags that you leave out keep the values that they have in the run. The counts of failures start again from zero.
    Flags that would change the steps of the training, such as --lr, need hpc fork.
    """

    program: Annotated[Any, INTERNAL] = None
    """Changes of the flags of the run's program, by name."""
    new_code: bool = False
    """Run the present code of the repository in the current directory instead of the copy from the submission.
    What the run has written stays."""
    wait: bool = False
    """Wait until the run ends, and print its result."""


def options_of(given: Mapping[str, Any]) -> ResumeOptions:
    """Return the given flags, completed with the settings of the run. Raises UserError if a flag is wrong."""
    runs_dir = cli.runs_dir(given)
    run = cli.find_own_run(given["run"], runs_dir)
    spec = RunSpec.load(run)
    adjustable = program.default_values(ResumeOptions)
    own = {name: value for name, value in settings_of(spec).items() if name in adjustable}
    typed = {name: value for name, value in given.items() if name in adjustable}
    changes = {name: value for name, value in given.items() if name not in adjustable}
    return dataclasses.replace(program.build(ResumeOptions, {**own, **typed, "runs-dir": runs_dir}), program=changes)


def resume_run(options: ResumeOptions) -> tuple[RunDir, dict[str, Any]]:
    """Check the run, put the new spec into force, and submit the run's next job.

    Returns:
        The run, and the document of `hpc resume --json`.

    Raises:
        UserError: the run has not ended or cannot continue, or a flag cannot change.
        TorchrelayError: Slurm refuses the job, or another process has resumed the run.
    """
    # Nobody but the user may write to the files of the run (hpc.run.ownership).
    os.umask(os.umask(0) | 0o022)
    run = cli.find_own_run(options.run, options.runs_dir)
    before = RunSpec.load(run)
    restore_code(run)
    seen = History.load(run)
    wait_for_ending_job(run)
    # The ledger is read before squeue. If another process submits a job in between, squeue shows the job. If it submits
    # one later, our claim fails.
    history = History.load(run)
    if len(history.of(Cancelled)) > len(seen.of(Cancelled)):
        raise UserError(
            f"run {run.name} was cancelled while hpc resume waited for the end of its job: to continue it, type "
            f"hpc resume {shlex.quote(options.run)} again"
        )
    if options.new_code and before.in_place:
        raise UserError(
            f"--new-code: run {run.name} runs {program_of(before.script)} in place, and so always the present code: "
            "leave it out"
        )
    if not options.new_code and has_damaged_packages(run):
        typed = "hpc submit for a new run" if before.in_place else f"hpc resume {shlex.quote(options.run)} --new-code"
        raise UserError(f"{run.packages} is damaged, so the run cannot start: type {typed}")
    after = _adjusted(run, before, options, history)
    _check_has_ended(run, before, history, shlex.quote(options.run))
    job_id = _continue(run, before, after, history, new_code=options.new_code)
    changed = changed_settings(before, after)
    return run, {
        "run": run.name, "run_dir": str(run.path), "job_id": job_id, "cluster": after.cluster, "changed": changed,
    }  # fmt: skip


# --- what must hold ---


def _check_has_ended(run: RunDir, spec: RunSpec, history: History, typed: str) -> None:
    """Refuse a run that was cancelled for good, has a job, was copied or moved, or has lost its saved state.

    `typed` is the run's name on the command line.
    """
    if history.is_cancelled_for_good:
        raise UserError(
            f"run {run.name} was cancelled with --final: continue under a new name with hpc fork {typed} --name NEW"
        )
    if job := job_of(run):
        raise UserError(
            f"run {run.name} has {job}: hpc resume is for runs that have ended; type hpc cancel {typed}, and repeat "
            "hpc resume"
        )
    if spec.cluster == "slurm" and not handover.has_own_script(run):
        raise UserError(
            f"{run.script} belongs to another run directory, so this one is a copy or was moved: type hpc fork "
            f"{typed} --name NEW"
        )
    saved = spec.forked_from or any(isinstance(event, CheckpointSaved | SnapshotSaved) for event in history.events)
    if saved and not list_checkpoints(run.checkpoints):
        raise UserError(
            f"run {run.name} has no checkpoints left in {run.checkpoints}, so it would start from the beginning: type "
            "hpc submit for a new run"
        )


def _adjusted(run: RunDir, before: RunSpec, options: ResumeOptions, history: History) -> RunSpec:
    """Return the spec with the flags of the command line. Checks changed flags as hpc submit does."""
    completed, current = history.last(TrainCompleted), program_of_run(before)
    begun = Begun(
        run=run, typed=options.run, complete=history.is_complete, ended=completed.ended if completed else None
    )
    adjusted = current.adjusted(options.program or {}, begun)
    kept = before.program if adjusted == current else adjusted.as_program()
    after = dataclasses.replace(
        before, program=kept, resources=options.resources, recovery=options.recovery, network=options.network
    )
    if options.notification != before.notification:  # else a missing recipient costs only its messages
        after = dataclasses.replace(after, notification=with_known_names(options.notification))
    if (after.resources, after.recovery, after.network) == (before.resources, before.recovery, before.network):
        return after
    checks.check_setup(after.resources.setup, after.cluster)
    resources = complete(after.resources, after.cluster, after.recovery.spares)
    after = dataclasses.replace(after, resources=resources)
    checks.check_recovery(after)
    adjusted.check_ranks(resources.nodes.most * resources.ranks_per_node, has_gpus=after.device != "cpu")
    return after


def changed_settings(before: RunSpec, after: RunSpec) -> dict[str, Any]:
    """Return the flags that differ between two specs, with their new values. Pure."""
    old, new = plain(settings_of(before)), plain(settings_of(after))
    return {f"--{name}": value for name, value in new.items() if value != old[name]}


# --- what is done ---


def _continue(run: RunDir, before: RunSpec, after: RunSpec, history: History, *, new_code: bool) -> str:
    """Put the spec `after` into force and start the next job. Returns its id. After an error, `before` is in force."""
    attempts, number = history.attempts, next_resumption(run)
    attempt = attempts[-1].attempt if attempts else 0
    replaced = None
    with ExitStack() as cleanup, ExitStack() as undo:
        copy = prepare_code(run, after, cleanup) if new_code else None
        if not handover.claim_next_job(run, attempt, history):
            raise TorchrelayError(f"another process submits the next job of run {run.name}: see hpc status {run.name}")
        if copy:
            after = dataclasses.replace(
                after, program=copy.code.program if copy.code.script else after.program,
                working_directory=copy.code.working_directory,
            )  # fmt: skip
            replaced = replace_code(run, copy, number, undo)
        after.save(run, number)
        if after.cluster == "slurm" and (new_code or after != before):
            undo.callback(write_atomic, run.script, run.script.read_bytes())
            write_atomic(run.script, SlurmExecutor(run, after).script())
        if attempts and attempts[-1].ended is None:
            cause = Cause.CANCELLED if history.is_cancelled else Cause.LOST
            handover.record_missing_end(run, attempts[-1], "its agents recorded no end", cause=cause)
        if run.final.exists():
            kept = run.earlier_final(number)
            run.final.rename(kept)
            undo.callback(kept.rename, run.final)
        resumed = Resumed(
            attempt=attempt, number=number, cancellations=len(history.of(Cancelled)),
            changed=changed_settings(before, after), stop_lead_seconds=after.stop_lead_seconds,
            revision=run.revision.read_text().strip() if copy and run.revision.exists() else None,
            grace_seconds=preemption_grace(after),
        )  # fmt: skip
        if not record_once(resumption_file(run, number), resumed):
            raise TorchrelayError(f"another process has resumed run {run.name}: see hpc status {run.name}")
        undo.callback(resumption_file(run, number).unlink)
        try:
            job_id = _start(run, after, number, attempt, history)
        except TorchrelayError as error:
            raise type(error)(f"run {run.name} stays as it was: {error}") from error
        undo.pop_all()
        remove_directory(run.previous_code)
    if replaced:
        print(visible(f"hpc resume: files of the run that gave way to the new code are in {replaced}"), file=sys.stderr)
    return job_id


def _start(run: RunDir, spec: RunSpec, number: int, attempt: int, history: History) -> str:
    """Start the next job, record it, and redirect the jobs of waiting runs to it. Returns the job's id."""
    writer = EventWriter(resumption_file(run, number), attempt)
    old, excluded = history.last_job_id, list[str]()
    if spec.cluster == "slurm":
        excluded = bad_nodes.nodes_to_exclude(run, spec)
        job_id = handover.submit_next_job(run, spec, excluded, history.job_ids)
    else:
        job_id = start_local(run)
    writer.append(Resubmitted(job_id=job_id, old_job_id=old, excluded=tuple(excluded)))
    if spec.cluster == "slurm":
        try:
            redirect_waiting_jobs(run)
        except TorchrelayError as error:
            print(f"hpc resume: runs that wait for {run.name} may stay held: {error}", file=sys.stderr)
    return job_id
