"""The start of an attempt: exactly one agent claims it, the others join.

Runs on compute nodes. A claim, like the record of an attempt's end (hpc.slurm.handover), is an event file that exactly
one process can create. The file appears with its first line, never empty.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial

from hpc.base.errors import TorchrelayError
from hpc.base.files import can_write
from hpc.run.causes import JobState
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt, attempts_of
from hpc.run.events.history import History
from hpc.run.events.kinds import Claimed, Refused
from hpc.run.events.ledger import EventWriter, claim_file, record_once
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import handover, squeue
from hpc.slurm.predecessors import dependency, predecessors_of, wait_again
from jobs.node_attempt import STORAGE_SECONDS, NodeAllocation, ask_slurm, await_storage, log

_POLL_SECONDS = 0.5
# Slurm gives an ending job KillWait, seldom more than a minute, to save.
_ENDING_SECONDS = 120.0
# A live first node's agent claims within seconds. After this time, the other agents ask Slurm whether the node is dead.
_LOOK_SECONDS = 30.0
# Longer than a fail-over of Slurm's controller (SlurmctldTimeout, 120 s), but shorter than other agents wait to join.
_CONTROLLER_SECONDS = 480.0
# Slurm kills the processes of a requeued job after KillWait, by default 30 s.
_AFTER_REQUEUE_SECONDS = 20.0


class FirstNodeLostError(TorchrelayError):
    """The first node was lost before its agent had claimed an attempt."""


def claim_next(
    run: RunDir, allocation: NodeAllocation, port: int, secret: str, addresses: Sequence[str] = (),
    *, start_once: bool = False,
) -> Attempt:  # fmt: skip
    """Claim the next attempt if no other job works on this run. If the last attempt has no recorded end, record one.

    Raises:
        TorchrelayError: another job works on the run or has replaced this one, the run was cancelled, or Slurm does not
            answer.
    """
    history = History.load(run)
    if history.is_cancelled:
        raise TorchrelayError(f"run {run.name} was cancelled, so this job starts nothing: type {_resume(run)}")
    # Slurm requeues a preempted job that it ended before the agents could end it.
    was_replaced = allocation.job_id in {attempt.job_id for attempt in history.attempts} - {history.last_job_id}
    if history.outcome == "failed" and was_replaced:
        raise TorchrelayError(
            f"run {run.name} has failed in a later job, so this job starts nothing: type {_resume(run)}"
        )
    last = history.last_attempt
    if last is not None and secret and last.secret == secret:
        return last  # an earlier try claimed it although the storage reported an error
    if last is not None and last.start_once and not last.resumed:
        raise TorchrelayError(
            f"run {run.name} has started before, and has --start-once, so this job starts nothing: type {_resume(run)}"
        )
    if last is not None and last.ended is None:
        if last.job_id != allocation.job_id:
            _wait_for_job_end(last.job_id, run, allocation)
        handover.record_missing_end(run, last, "the job ended, and its agents recorded no reason (was a node lost?)")
    return claim(run, allocation, port, secret, addresses, start_once=start_once)


def refuse_if_complete(run: RunDir, allocation: NodeAllocation) -> bool:
    """Return whether the run is complete. If so, the first node's agent records that this job makes no attempt.

    Only that agent also reads the events: the completion of a run without a result is recorded nowhere else.
    """
    if run.final_result.exists():
        advice = f"to train longer, type {_resume(run)} --epochs N"
    elif allocation.is_first and History(ledger.read_without_other_nodes(run.events)).is_complete:
        advice = "to run its script again, submit it under a new name"
    else:
        return False
    reason = f"run {run.name} is complete, so this job starts nothing: {advice}"
    log(reason)
    if allocation.is_first:
        refuse(run, allocation, reason)
    return True


def must_wait(run: RunDir, spec: RunSpec, allocation: NodeAllocation) -> bool:
    """Return whether the run must still wait for other runs. If so, this job is requeued and makes no attempt.

    Such a job started because the jobs of the other runs have ended, but those runs go on in new jobs
    (hpc.slurm.predecessors). If the wait cannot end, for example because a run that must be complete has failed, the
    job is held in the queue, like a job whose dependency is never satisfied. `hpc resume` of that run releases it.

    Raises:
        TorchrelayError: Slurm does not answer, or refuses to requeue the job.
    """
    if allocation.cluster != "slurm" or not (spec.after or spec.after_ok):
        return False
    jobs = ask_slurm(squeue.jobs, _CONTROLLER_SECONDS)
    waits = [predecessor for predecessor in predecessors_of(run, spec, jobs) if not predecessor.is_over]
    if not waits:
        return False
    job_id = allocation.job_id
    problem = next((predecessor.problem for predecessor in waits if predecessor.problem), None)
    reason = problem or f"it waits for {', '.join(f'run {predecessor.run.name}' for predecessor in waits)}"
    refuse(run, allocation, reason, waits=True)
    log(f"this job goes back into the queue: {reason}")
    if problem is None:
        ask_slurm(lambda: slurm.requeue(job_id), _CONTROLLER_SECONDS)
        ask_slurm(lambda: slurm.update(job_id, Dependency=dependency(run, spec, jobs)), _AFTER_REQUEUE_SECONDS)
    else:
        ask_slurm(lambda: slurm.requeue_held(job_id), _CONTROLLER_SECONDS)
        # If the other run got a new job before this one was held, release this one to wait for the new job.
        ask_slurm(lambda: wait_again(run, job_id, squeue.jobs(), held=True), _AFTER_REQUEUE_SECONDS)
    return True


def _resume(run: RunDir) -> str:
    return f"hpc resume {shlex.quote(str(run.path))}"


def _wait_for_job_end(job_id: str, run: RunDir, allocation: NodeAllocation) -> None:
    """Wait until a job of the run has ended or is pending. Raises TorchrelayError if it runs, or after two minutes."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while allocation.cluster == "slurm":
        job = ask_slurm(squeue.jobs, _CONTROLLER_SECONDS).get(job_id)
        if job is None or job.state is JobState.PENDING:
            return
        if not job.state.alive and job.state is not JobState.UNKNOWN:
            return
        if job.state is JobState.RUNNING or time.monotonic() > deadline:
            raise TorchrelayError(
                f"run {run.name} is running in job {job_id}: wait for it, or type hpc cancel {run.name}"
            )
        time.sleep(_POLL_SECONDS)


def claim(
    run: RunDir, allocation: NodeAllocation, port: int, secret: str, addresses: Sequence[str] = (),
    *, start_once: bool = False,
) -> Attempt:  # fmt: skip
    """Claim the next attempt of the run for this job.

    The agents of the other nodes find the first node's agent on `port`, at one of the `addresses`.

    Raises:
        TorchrelayError: another agent was quicker, or this start of the job has already made an attempt.
    """
    attempts = History.load(run).attempts
    # submitit's local executor does not count the restarts of a job.
    if allocation.cluster == "slurm" and allocation.job_start in {attempt.job_start for attempt in attempts}:
        raise TorchrelayError(f"job {allocation.job_id} has already started an attempt: submit the script again")
    number = len(attempts) + 1
    claimed = Claimed(
        time=time.time(), attempt=number, job_id=allocation.job_id, restart=allocation.restart, secret=secret,
        nodes=tuple(allocation.hostnames), port=port, addresses=tuple(addresses), start_once=start_once,
    )  # fmt: skip
    # Use the first node's event file even if the agent of another node claims, so that only one claim can succeed.
    if not record_once(claim_file(run, number), claimed):
        raise TorchrelayError(f"attempt {number} of run {run.name} has just been claimed by another job")
    return attempts_of([claimed])[0]


def refuse(run: RunDir, allocation: NodeAllocation, reason: str, *, waits: bool = False) -> None:
    """Record for the other nodes' agents that this job start makes no attempt, and why.

    `waits` is True if the run waits for other runs.
    """
    job_id, restart = allocation.job_start
    writer = EventWriter(run.events / f"job-{job_id}-{restart}.jsonl")
    writer.append(Refused(job_id=job_id, restart=restart, detail=reason, waits=waits))


def why_nothing_started(history: History, allocation: NodeAllocation) -> str | None:
    """Return why this job start makes no attempt; None if no agent has refused it."""
    refusals = history.of(Refused)
    return next((event.detail for event in refusals if (event.job_id, event.restart) == allocation.job_start), None)


def join(
    run: RunDir, allocation: NodeAllocation, stopped: Callable[[], bool], timeout_seconds: float
) -> Attempt | None:
    """Wait until the first node claims an attempt for this job start. Returns None if `stopped` returns true first.

    The timeout restarts while the storage is full or hangs, because the first node's agent then waits, too.

    Raises:
        FirstNodeLostError: the first node is dead, and Slurm has noticed.
        TorchrelayError: the first node's agent made no attempt or no claim in time, or the attempt has already ended.
        OSError: the run directory cannot be read.
    """
    began = time.monotonic()
    deadline, look_at, latest = began + timeout_seconds, began + _LOOK_SECONDS, began + STORAGE_SECONDS
    while not stopped():
        history = History(await_storage(run, stopped, partial(ledger.read_without_other_nodes, run.events)))
        if (reason := why_nothing_started(history, allocation)) is not None:
            raise TorchrelayError(reason)
        newest = history.last_attempt
        # submitit's local executor counts no restarts: an attempt that this node has joined is from an earlier start.
        if (
            newest is not None
            and newest.job_start == allocation.job_start
            and not ledger.agent_file(run, newest.attempt, allocation.node_rank).exists()
        ):
            if newest.ended:
                raise TorchrelayError(f"attempt {newest.attempt} ended before this node could join it")
            return newest
        now = time.monotonic()
        if look_at < now < latest and (now > look_at + _LOOK_SECONDS or not can_write(run.events)):
            deadline = now + timeout_seconds
        if now > deadline:
            raise TorchrelayError(
                f"the agent on the first node, {allocation.first_node}, did not start within {timeout_seconds:.0f} s: "
                "see the job's log in logs/"
            )
        if now > look_at:
            look_at = now + _LOOK_SECONDS
            if has_lost_first_node(allocation):
                raise FirstNodeLostError(f"{allocation.first_node}, the first node, was lost before its agent started")
        time.sleep(_POLL_SECONDS)
    return None


def has_lost_first_node(allocation: NodeAllocation) -> bool:
    """Return whether Slurm has removed the dead first node from this job; False also if Slurm does not answer."""
    if allocation.cluster != "slurm":
        return False
    try:
        job = squeue.jobs().get(allocation.job_id)
        return job is not None and squeue.lacks_first_node(job)
    except TorchrelayError:
        return False
