"""Performs a decision of the supervisor; may be interrupted at any point and repeated. Runs on the login node."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from hpc.base.errors import TorchrelayError
from hpc.run.causes import Cause, JobState
from hpc.run.events.history import History
from hpc.run.events.kinds import Event, Excluded, Released, Requeued, Resubmitted, Scancelled
from hpc.run.events.ledger import EventWriter
from hpc.run.spec import RunSpec
from hpc.slurm import bad_nodes, handover
from hpc.slurm import client as slurm
from hpc.slurm.predecessors import redirect_waiting_jobs
from hpc.slurm.squeue import job_state
from hpc.supervise.decide import STARTS, Action, Decision
from hpc.supervise.observe import RunObservation

# A start in the same second as the requeue would fail for good: slurmd refuses its credential.
_SOON = "now+2"


def perform(observed: RunObservation, decision: Decision) -> None:
    """Perform a decision.

    Raises:
        TorchrelayError: Slurm refuses the action or does not answer, or the run directory was copied or moved.
        OSError: the run directory was deleted, or its storage is full.
    """
    run, job_id = observed.run, decision.job_id
    if decision.action in STARTS and not handover.has_own_script(run):
        # The jobs of a copied run directory would train the original.
        raise TorchrelayError(f"{run.script} belongs to another run directory: is this one a copy, or was it moved?")
    match decision.action:
        case Action.START_NOW | Action.RELEASE:
            _release(observed, decision)
        case Action.ALLOW_NODES:
            _allow_nodes(observed, decision)
        case Action.REQUEUE:
            if _record_missing_end(observed, decision):
                _requeue(observed, decision)
        case Action.RESUBMIT:
            _resubmit(observed, decision)
        case Action.CANCEL:
            slurm.cancel(str(job_id))
        case Action.RECORD:
            if decision.cause:
                _record_missing_end(observed, decision)
            else:
                _record(observed, Scancelled(job_id=observed.history.last_job_id))
            _redirect_waiting_jobs(observed)


def _requeue(observed: RunObservation, decision: Decision) -> None:
    """Requeue a job that has ended, or submit a new job if Slurm refuses the requeue."""
    try:
        slurm.requeue(str(decision.job_id))
    except slurm.SlurmRefusalError:
        _resubmit(observed, replace(decision, job_id=None, cause=None))  # the end is already recorded
    else:
        _record(observed, Requeued(job_id=str(decision.job_id)))


def _record(observed: RunObservation, event: Event) -> None:
    file = observed.run.events / f"supervisor-{socket.gethostname()}-{os.getpid()}.jsonl"
    EventWriter(file, observed.attempt).append(event)


def _record_missing_end(observed: RunObservation, decision: Decision) -> bool:
    """Record the end of the attempt if the ledger lacks it. Returns False if another process recorded it first."""
    last, run, cause = observed.last, observed.run, decision.cause
    if last is None or cause is None:
        return True
    suspect = last.nodes[0] if cause in {Cause.LOST, Cause.NODE_FAILURE} else None
    return handover.record_missing_end(run, last, decision.reason, cause=cause, suspect=suspect)


def _release(observed: RunObservation, decision: Decision) -> None:
    """Let a delayed or held job start now, on nodes that have not failed the run. If it cannot, replace the job."""
    if decision.action is Action.START_NOW and slurm.makes_job_directories():
        _resubmit(observed, decision)
        return
    try:
        excluded = bad_nodes.nodes_to_exclude(observed.run, RunSpec.load(observed.run))
        if set(excluded) != set(observed.excluded):
            _exclude(observed, decision, excluded)
    except TorchrelayError as error:  # the job starts nevertheless
        print(f"hpc supervise: {observed.run.name}: nodes that failed it are not excluded: {error}", file=sys.stderr)
    if decision.action is Action.RELEASE:
        slurm.release(str(decision.job_id))
    slurm.update(str(decision.job_id), StartTime=_SOON)
    _record(observed, Released(job_id=decision.job_id))


def _allow_nodes(observed: RunObservation, decision: Decision) -> None:
    try:
        _exclude(observed, decision, observed.excludable)
    except slurm.SlurmRefusalError:  # Slurm does not change a job in the state EXPEDITING
        _resubmit(observed, decision)


def _exclude(observed: RunObservation, decision: Decision, nodes: Sequence[str]) -> None:
    slurm.update(str(decision.job_id), ExcNodeList=",".join(nodes))
    _record(observed, Excluded(job_id=str(decision.job_id), excluded=tuple(nodes)))


def _resubmit(observed: RunObservation, decision: Decision) -> None:
    """Submit the run's next job and cancel the old one, unless another process has continued or cancelled the run."""
    run, old = observed.run, decision.job_id
    last_id = observed.history.last_job_id
    if old is None and last_id is not None:
        state = job_state(slurm.show_job(last_id).get("JobState", ""))
        if state.alive and state is not JobState.ENDING:
            return  # squeue does not list the job, but Slurm still has it
    if not _record_missing_end(observed, decision):
        return
    history = History.load(run)
    if len(history.attempts) != len(observed.history.attempts) or history.is_cancelled:
        return  # another attempt has started, or the user has cancelled the run
    if history.may_restart:
        if not handover.claim_next_job(run, observed.attempt, observed.history):
            return
        spec = RunSpec.load(run)
        excluded = bad_nodes.nodes_to_exclude(run, spec)
        job_ids = {*(attempt.job_id for attempt in observed.history.attempts), *([old] if old else [])}
        try:
            new = handover.submit_next_job(run, spec, excluded, job_ids)
        except TorchrelayError:
            if old:  # a limit on jobs per user may forbid the new job until the old one has ended
                slurm.cancel(old)
            raise
        _record(observed, Resubmitted(job_id=new, old_job_id=old, excluded=tuple(excluded)))
        _redirect_waiting_jobs(observed, (old, new) if old else None)
    if old:
        slurm.cancel(old)


def _redirect_waiting_jobs(observed: RunObservation, replaced: tuple[str, str] | None = None) -> None:
    try:
        redirect_waiting_jobs(observed.run, replaced)
    except TorchrelayError as error:
        print(f"hpc supervise: jobs that wait for {observed.run.name} stay as they are: {error}", file=sys.stderr)
