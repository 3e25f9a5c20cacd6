"""Who starts an attempt: exactly one agent claims it, the others join.

Runs on compute nodes. A claim, like an end (hpc.slurm.resubmit), is an event file that is created exclusively,
with its line in it.
"""

import time
from collections.abc import Callable

from hpc.core import ledger
from hpc.core.attempts import Attempt, attempts_of
from hpc.core.causes import JobState
from hpc.core.errors import TorchrelayError
from hpc.core.files import json_line, write_exclusive
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm import resubmit
from jobs.node_attempt import NodeAllocation, ask_slurm

_POLL_SECONDS = 0.5
# KillWait, which an ending job may take to save, is seldom more than a minute.
_ENDING_SECONDS = 120.0
# Longer than a fail-over of Slurm's controller (SlurmctldTimeout, 120 s), shorter than the other agents wait to join.
_CONTROLLER_SECONDS = 480.0


def event_file(run: RunDir, attempt: int, node_rank: int) -> EventWriter:
    """The ledger file of one node's agent in one attempt."""
    return EventWriter(run.events / f"{ledger.attempt_prefix(attempt)}node-{node_rank:02d}.jsonl")


def claim_next(run: RunDir, allocation: NodeAllocation, port: int, secret: str) -> Attempt:
    """Claim the next attempt, after making sure that no other job works on this run.

    Raises:
        TorchrelayError: another job does, or the run was cancelled.
    """
    events = ledger.read(run.events)
    if any(event["event"] == "cancelled" for event in events):
        raise TorchrelayError(f"run {run.name} was cancelled: submit it under a new name")
    last = next(reversed(attempts_of(events)), None)
    if last is not None and last.ended is None:
        if last.job_id != allocation.job_id:
            _wait_for_job_end(last.job_id, run, allocation)
        resubmit.record_missing_end(run, last, "ended without reporting (node lost?)")
    return claim(run, allocation, port, secret)


def _wait_for_job_end(job_id: str, run: RunDir, allocation: NodeAllocation) -> None:
    """Wait while another job of the run is ending and saves its state; an error if it runs, or does not end."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while allocation.cluster == "slurm":
        job = ask_slurm(slurm.jobs, _CONTROLLER_SECONDS).get(job_id)
        if job is None or job.state is JobState.PENDING:
            return
        if not job.state.alive and job.state is not JobState.UNKNOWN:
            return
        if job.state is JobState.RUNNING or time.monotonic() > deadline:
            raise TorchrelayError(
                f"run {run.name} is running in job {job_id}: wait for it, or type hpc cancel {run.name}"
            )
        time.sleep(_POLL_SECONDS)


def claim(run: RunDir, allocation: NodeAllocation, port: int, secret: str) -> Attempt:
    """Claim the next attempt of the run for this job, whose head node's agent listens to the others on `port`.

    Raises:
        TorchrelayError: another agent was quicker.
    """
    number = len(attempts_of(ledger.read(run.events))) + 1
    job = {"job_id": allocation.job_id, "restart": allocation.restart, "nodes": list(allocation.hostnames)}
    event = ledger.record("claimed", attempt=number, secret=secret, port=port, **job)
    if not write_exclusive(event_file(run, number, allocation.node_rank).path, json_line(event)):
        raise TorchrelayError(f"attempt {number} of run {run.name} has just been claimed by another job")
    return attempts_of([event])[0]


def refuse(run: RunDir, allocation: NodeAllocation, reason: str) -> None:
    """Report to the other nodes' agents that this start of the job does nothing."""
    writer = EventWriter(run.events / f"job-{allocation.job_id}-{allocation.restart}.jsonl")
    writer.append("refused", job_id=allocation.job_id, restart=allocation.restart, detail=reason)


def join(
    run: RunDir, allocation: NodeAllocation, stopped: Callable[[], bool], timeout_seconds: float
) -> Attempt | None:
    """Wait for the head node's claim for this very start of the job; None if `stopped` first.

    Raises:
        TorchrelayError: the head node's agent refused, or no claim came.
    """
    deadline = time.monotonic() + timeout_seconds
    while not stopped():
        events = ledger.read(run.events)
        for event in events:
            if event["event"] == "refused" and (event["job_id"], event["restart"]) == allocation.job_start:
                raise TorchrelayError(event["detail"])
        newest = next(reversed(attempts_of(events)), None)
        # submitit's local executor restarts a job without counting: an attempt that this node has joined is older.
        if (
            newest is not None
            and (newest.job_id, newest.restart) == allocation.job_start
            and not event_file(run, newest.attempt, allocation.node_rank).path.exists()
        ):
            if newest.ended:
                raise TorchrelayError(f"attempt {newest.attempt} ended before this node could join it")
            return newest
        if time.monotonic() > deadline:
            raise TorchrelayError(f"the head node {allocation.head} claimed no attempt within {timeout_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return None
