"""What the supervisor does, each action so that it may be cut short anywhere and begun again. On the login node."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hpc.core import ledger
from hpc.core.attempts import attempts_of, last_job_id, may_restart_after
from hpc.core.errors import TorchrelayError
from hpc.core.ledger import Event, EventWriter
from hpc.core.outcome import Cause, JobState
from hpc.slurm import client as slurm
from hpc.slurm import relaunch
from hpc.slurm.squeue import job_state
from hpc.spec import RunSpec
from hpc.supervise.decision import STARTS, Action, Decision
from hpc.supervise.observe import ObservedRun

# In the very second of a requeue, slurmd would refuse the new start's credential, and the job would fail for good.
_SOON = "now+2"


def perform(watched: ObservedRun, decision: Decision) -> None:
    """Do what was decided.

    Raises:
        TorchrelayError: Slurm refused it, or does not answer; or the run is a copy.
        OSError: the run directory is gone, or its storage is full.
    """
    run = watched.run
    if decision.action in STARTS and str(run.path) not in run.script.read_text(encoding="utf-8"):
        # Its jobs would work on the run that it was copied from.
        raise TorchrelayError(f"{run.script} belongs to another run directory: is this one a copy, or was it moved?")
    _DOES[decision.action](watched, decision)


def _note(watched: ObservedRun, event: str, **fields: Any) -> None:
    writer = EventWriter(watched.run.events / f"supervisor-{socket.gethostname()}-{os.getpid()}.jsonl")
    writer.append(event, attempt=_attempt(watched), **fields)


def _attempt(watched: ObservedRun) -> int:
    """The last one's number; 0 before the first."""
    return watched.view.last.attempt if watched.view.last else 0


def _end(watched: ObservedRun, cause: Cause, reason: str) -> bool:
    """Write down the end of the attempt; False if somebody else was quicker."""
    last, run = watched.view.last, watched.run
    if last is None:
        return True
    node: dict[str, str] = {}
    if cause in {Cause.LOST, Cause.NODE_FAILURE}:
        dead = slurm.dead_nodes(list(last.nodes))
        cause, node = (Cause.NODE_FAILURE if dead else cause), {"node": [*dead, last.nodes[0]][0]}
    step = relaunch.last_step(run) or (0 if RunSpec.load(run).train else None)
    heard = max(last.started, watched.view.alive_at or 0.0)
    return relaunch.record_end(run, last.attempt, cause=cause, step=step, detail=reason, last_heard=heard, **node)


def _release(watched: ObservedRun, decision: Decision) -> None:
    _avoid(watched, decision)
    slurm.set_start_time(str(decision.job_id), _SOON)
    _note(watched, "released", job_id=decision.job_id)


def _unhold(watched: ObservedRun, decision: Decision) -> None:
    _avoid(watched, decision)
    slurm.release(str(decision.job_id))
    slurm.set_start_time(str(decision.job_id), _SOON)
    _note(watched, "released", job_id=decision.job_id)


def _avoid(watched: ObservedRun, decision: Decision) -> None:
    """Keep the job away from nodes that failed the run; without that it starts all the same."""
    try:
        excluded = relaunch.nodes_to_exclude(RunSpec.load(watched.run), watched.events)
        if set(excluded) != set(watched.view.excluded):
            _exclude(watched, decision, excluded)
    except TorchrelayError as error:
        print(f"hpc supervise: {watched.run.name} may get nodes that failed it: {error}", file=sys.stderr)


def _admit(watched: ObservedRun, decision: Decision) -> None:
    _exclude(watched, decision, watched.view.affordable)


def _exclude(watched: ObservedRun, decision: Decision, nodes: Sequence[str]) -> None:
    slurm.set_excluded_nodes(str(decision.job_id), nodes)
    _note(watched, "excluded", job_id=decision.job_id, excluded=list(nodes))


def _requeue(watched: ObservedRun, decision: Decision) -> None:
    if decision.cause is not None and not _end(watched, decision.cause, decision.reason):
        return
    slurm.requeue(str(decision.job_id))
    _note(watched, "requeued", job_id=decision.job_id)


def _relaunch(watched: ObservedRun, decision: Decision) -> None:
    if decision.job_id is None and _is_there(watched):
        return
    if decision.cause is not None and not _end(watched, decision.cause, decision.reason):
        return
    events = ledger.read(watched.run.events)
    attempts = attempts_of(events)
    if len(attempts) != len(watched.view.attempts) or any(event["event"] == "cancelled" for event in events):
        return  # it has gone on, or is not to
    if may_restart_after(attempts):
        if not relaunch.claim_next_job(watched.run, _attempt(watched), watched.events):
            return
        _submit(watched, decision, events)
    if decision.job_id:
        slurm.cancel(decision.job_id)


def _is_there(watched: ObservedRun) -> bool:
    """Whether Slurm does know the job that squeue has left out."""
    job_id = last_job_id(watched.events)
    state = job_state(slurm.show_job(job_id).get("JobState", "")) if job_id else JobState.UNKNOWN
    return state.alive and state is not JobState.ENDING


def _submit(watched: ObservedRun, decision: Decision, events: Sequence[Event]) -> None:
    run, spec, old = watched.run, RunSpec.load(watched.run), decision.job_id
    excluded = relaunch.nodes_to_exclude(spec, events)
    known = {*(attempt.job_id for attempt in watched.view.attempts), *([old] if old else [])}
    try:
        new = relaunch.submit_next_job(run, spec, excluded, known)
    except TorchrelayError:
        if old:  # it may be in the way of the new one, where users may have only so many jobs
            slurm.cancel(old)
        raise
    _note(watched, "relaunched", job_id=new, old_job_id=old, excluded=excluded)


def _cancel(_watched: ObservedRun, decision: Decision) -> None:
    slurm.cancel(str(decision.job_id))


def _record(watched: ObservedRun, decision: Decision) -> None:
    if watched.view.open:
        _end(watched, Cause.CANCELLED, decision.reason)
    else:
        _note(watched, "dropped", job_id=last_job_id(watched.events))


_DOES: dict[Action, Callable[[ObservedRun, Decision], None]] = {
    Action.RELEASE: _release,
    Action.UNHOLD: _unhold,
    Action.ADMIT: _admit,
    Action.REQUEUE: _requeue,
    Action.RELAUNCH: _relaunch,
    Action.CANCEL: _cancel,
    Action.RECORD: _record,
}
