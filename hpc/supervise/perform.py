"""Performs a decision of the supervisor. Runs on the login node.

Each action may be interrupted at any point and repeated by the next supervisor.
"""

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
from hpc.supervise.decide import STARTS, Action, Decision
from hpc.supervise.observe import ObservedRun

# A start in the same second as the requeue would fail for good: slurmd refuses its credential.
_SOON = "now+2"


def perform(observed: ObservedRun, decision: Decision) -> None:
    """Do what was decided.

    Raises:
        TorchrelayError: Slurm refused it, or does not answer; or the run directory is a copy.
        OSError: the run directory was deleted, or its storage is full.
    """
    run = observed.run
    if decision.action in STARTS and str(run.path) not in run.script.read_text(encoding="utf-8"):
        # Its jobs would train the run that it was copied from.
        raise TorchrelayError(f"{run.script} belongs to another run directory: is this one a copy, or was it moved?")
    _PERFORMERS[decision.action](observed, decision)


def _record_event(observed: ObservedRun, event: str, **fields: Any) -> None:
    writer = EventWriter(observed.run.events / f"supervisor-{socket.gethostname()}-{os.getpid()}.jsonl")
    writer.append(event, attempt=observed.known.attempt, **fields)


def _record_end(observed: ObservedRun, cause: Cause, reason: str) -> bool:
    """Record the end of the attempt; False if another process did so first."""
    last, run = observed.known.last, observed.run
    if last is None:
        return True
    node: dict[str, str] = {}
    if cause in {Cause.LOST, Cause.NODE_FAILURE}:
        dead = slurm.dead_nodes(list(last.nodes))
        cause, node = (Cause.NODE_FAILURE if dead else cause), {"node": [*dead, last.nodes[0]][0]}
    step = relaunch.last_step(run) or (0 if RunSpec.load(run).train else None)
    heard = max(last.started, observed.known.heartbeat_at or 0.0)
    return relaunch.record_end(run, last.attempt, cause=cause, step=step, detail=reason, last_heard=heard, **node)


def _release(observed: ObservedRun, decision: Decision) -> None:
    _exclude_failed_nodes(observed, decision)
    if decision.action is Action.UNHOLD:
        slurm.release(str(decision.job_id))
    slurm.set_start_time(str(decision.job_id), _SOON)
    _record_event(observed, "released", job_id=decision.job_id)


def _exclude_failed_nodes(observed: ObservedRun, decision: Decision) -> None:
    """Exclude nodes that failed the run; if that fails, the job starts all the same."""
    try:
        excluded = relaunch.nodes_to_exclude(RunSpec.load(observed.run), observed.events)
        if set(excluded) != set(observed.known.excluded):
            _exclude(observed, decision, excluded)
    except TorchrelayError as error:
        print(f"hpc supervise: {observed.run.name}: nodes that failed it are not excluded: {error}", file=sys.stderr)


def _admit(observed: ObservedRun, decision: Decision) -> None:
    _exclude(observed, decision, observed.known.excludable)


def _exclude(observed: ObservedRun, decision: Decision, nodes: Sequence[str]) -> None:
    slurm.set_excluded_nodes(str(decision.job_id), nodes)
    _record_event(observed, "excluded", job_id=decision.job_id, excluded=list(nodes))


def _requeue(observed: ObservedRun, decision: Decision) -> None:
    if decision.cause is not None and not _record_end(observed, decision.cause, decision.reason):
        return
    slurm.requeue(str(decision.job_id))
    _record_event(observed, "requeued", job_id=decision.job_id)


def _relaunch(observed: ObservedRun, decision: Decision) -> None:
    if decision.job_id is None and _is_unlisted(observed):
        return
    if decision.cause is not None and not _record_end(observed, decision.cause, decision.reason):
        return
    events = ledger.read(observed.run.events)
    attempts = attempts_of(events)
    if len(attempts) != len(observed.known.attempts) or any(event["event"] == "cancelled" for event in events):
        return  # another attempt has started, or the user has cancelled the run
    if may_restart_after(attempts):
        if not relaunch.claim_next_job(observed.run, observed.known.attempt, observed.events):
            return
        _submit_next(observed, decision, events)
    if decision.job_id:
        slurm.cancel(decision.job_id)


def _is_unlisted(observed: ObservedRun) -> bool:
    """Whether Slurm still has the job that squeue does not list."""
    job_id = last_job_id(observed.events)
    state = job_state(slurm.show_job(job_id).get("JobState", "")) if job_id else JobState.UNKNOWN
    return state.alive and state is not JobState.ENDING


def _submit_next(observed: ObservedRun, decision: Decision, events: Sequence[Event]) -> None:
    run, spec, old = observed.run, RunSpec.load(observed.run), decision.job_id
    excluded = relaunch.nodes_to_exclude(spec, events)
    known = {*(attempt.job_id for attempt in observed.known.attempts), *([old] if old else [])}
    try:
        new = relaunch.submit_next_job(run, spec, excluded, known)
    except TorchrelayError:
        if old:  # a limit on jobs per user may keep the new one out until the old one has ended
            slurm.cancel(old)
        raise
    _record_event(observed, "relaunched", job_id=new, old_job_id=old, excluded=excluded)


def _cancel(_observed: ObservedRun, decision: Decision) -> None:
    slurm.cancel(str(decision.job_id))


def _record_scancel(observed: ObservedRun, decision: Decision) -> None:
    if observed.known.end_missing:
        _record_end(observed, Cause.CANCELLED, decision.reason)
    else:
        _record_event(observed, "scancelled", job_id=last_job_id(observed.events))


_PERFORMERS: dict[Action, Callable[[ObservedRun, Decision], None]] = {
    Action.RELEASE: _release,
    Action.UNHOLD: _release,
    Action.ADMIT: _admit,
    Action.REQUEUE: _requeue,
    Action.RELAUNCH: _relaunch,
    Action.CANCEL: _cancel,
    Action.RECORD: _record_scancel,
}
