"""What the supervisor does, each action so that it may be cut short anywhere and begun again. On the login node."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from hpc import ledger, relaunch, slurm
from hpc.attempts import attempts_of, failures_in_a_row
from hpc.decide import Action, Decision
from hpc.files import json_line, write_exclusive
from hpc.ledger import Writer
from hpc.outcome import Cause, goes_on
from hpc.processes import start_time
from hpc.rundir import RunDir
from hpc.spec import RunSpec
from hpc.watch import Watched

# In the very second of a requeue, slurmd would refuse the new start's credential, and the job would fail for good.
_SOON = "now+2"


def perform(watched: Watched, decision: Decision) -> None:
    """Do what was decided.

    Raises:
        TorchrelayError: Slurm refused it, or does not answer.
        OSError: the run directory is gone, or its storage is full.
    """
    _DOES[decision.action](watched, decision)


def _note(run: RunDir, event: str, **fields: Any) -> None:
    Writer(run.events / f"supervisor-{socket.gethostname()}-{os.getpid()}.jsonl").append(event, **fields)


def _attempt(watched: Watched) -> int:
    """The last one's number; 0 before the first."""
    return watched.view.last.attempt if watched.view.last else 0


def _end(watched: Watched, cause: Cause, reason: str) -> bool:
    """Write down the end of an attempt that has none; False if somebody else was quicker."""
    last, run = watched.view.last, watched.run
    if last is None or last.ended is not None:
        return True
    step = relaunch.last_step(run) or (0 if RunSpec.load(run).train else None)
    heard = max(last.started, watched.view.alive_at or 0.0)
    return relaunch.end(run, last.attempt, cause=cause, step=step, detail=reason, last_heard=heard, node=last.nodes[0])


def _release(watched: Watched, decision: Decision) -> None:
    _avoid(watched, decision)
    slurm.begin_at(str(decision.job_id), _SOON)
    _note(watched.run, "released", job_id=decision.job_id)


def _unhold(watched: Watched, decision: Decision) -> None:
    _avoid(watched, decision)
    slurm.release(str(decision.job_id))
    _note(watched.run, "released", job_id=decision.job_id)


def _avoid(watched: Watched, decision: Decision) -> None:
    excluded = relaunch.exclusions(RunSpec.load(watched.run), watched.events)
    if excluded:
        _exclude(watched, decision, excluded)


def _admit(watched: Watched, decision: Decision) -> None:
    _exclude(watched, decision, watched.view.affordable)


def _exclude(watched: Watched, decision: Decision, nodes: Sequence[str]) -> None:
    slurm.exclude(str(decision.job_id), nodes)
    _note(watched.run, "excluded", job_id=decision.job_id, excluded=list(nodes))


def _requeue(watched: Watched, decision: Decision) -> None:
    if decision.cause is not None and not _end(watched, decision.cause, decision.reason):
        return
    slurm.requeue(str(decision.job_id))
    _note(watched.run, "requeued", attempt=_attempt(watched), job_id=decision.job_id)


def _relaunch(watched: Watched, decision: Decision) -> None:
    run, attempt = watched.run, _attempt(watched)
    if decision.cause is not None and not _end(watched, decision.cause, decision.reason):
        return
    events = ledger.read(run.events)
    attempts = attempts_of(events)
    if not attempts or goes_on(attempts[-1].cause or Cause.LOST, failures_in_a_row(attempts)):
        # Of those that have decided the same, one creates the file: its name follows from what all of them have seen.
        if not _claim(run, attempt, sum(event["event"] == "relaunching" for event in watched.events)):
            return
        excluded = relaunch.exclusions(RunSpec.load(run), events)
        new = slurm.submit(run.script, excluded)
        _note(run, "relaunched", attempt=attempt, job_id=new, old_job_id=decision.job_id, excluded=excluded)
    if decision.job_id:
        slurm.cancel(decision.job_id)


def _claim(run: RunDir, attempt: int, before: int) -> bool:
    """Be the one that submits the next job; False if another supervisor is."""
    claim = ledger.record(
        "relaunching", attempt=attempt, host=socket.gethostname(), pid=os.getpid(), started=start_time(os.getpid())
    )
    return write_exclusive(run.events / f"next-{before + 1:03d}.jsonl", json_line(claim))


def _cancel(_watched: Watched, decision: Decision) -> None:
    slurm.cancel(str(decision.job_id))


def _record(watched: Watched, decision: Decision) -> None:
    _end(watched, Cause.CANCELLED, decision.reason)


_DOES: dict[Action, Callable[[Watched, Decision], None]] = {
    Action.RELEASE: _release,
    Action.UNHOLD: _unhold,
    Action.ADMIT: _admit,
    Action.REQUEUE: _requeue,
    Action.RELAUNCH: _relaunch,
    Action.CANCEL: _cancel,
    Action.RECORD: _record,
}
