"""Who begins an attempt: exactly one agent does, the others join and follow.

Runs on compute nodes. A claim, like an end (hpc.slurm.relaunch), is a file of events that is created exclusively,
with its line in it.
"""

import time
from collections.abc import Callable

from hpc.core import ledger
from hpc.core.attempts import Attempt, attempts_of
from hpc.core.errors import TorchrelayError
from hpc.core.files import json_line, refresh_nfs_cache, write_exclusive
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from jobs.ranks.rendezvous import NodeAllocation

_POLL_SECONDS = 0.5


def event_file(run: RunDir, attempt: int, node_rank: int) -> EventWriter:
    """The ledger file of one node's agent in one attempt."""
    return EventWriter(run.events / f"attempt-{attempt:03d}-node-{node_rank:02d}.jsonl")


def claim(run: RunDir, place: NodeAllocation, port: int, nonce: str) -> Attempt:
    """Claim the next attempt of the run for this job.

    Args:
        run: the run.
        place: of this agent, which is the head node's.
        port: where it listens to the other agents.
        nonce: what they know each other by.

    Raises:
        TorchrelayError: another agent was quicker.
    """
    number = len(attempts_of(ledger.read(run.events))) + 1
    event = ledger.record(
        "claimed",
        attempt=number,
        job_id=place.job_id,
        restart=place.restart,
        nonce=nonce,
        port=port,
        nodes=list(place.hostnames),
    )
    if not write_exclusive(event_file(run, number, place.node_rank).path, json_line(event)):
        raise TorchrelayError(f"attempt {number} of run {run.name} has just been claimed by another job")
    return attempts_of([event])[0]


def refuse(run: RunDir, place: NodeAllocation, reason: str) -> None:
    """Tell the other nodes' agents that this start of the job does nothing."""
    writer = EventWriter(run.events / f"job-{place.job_id}-{place.restart}.jsonl")
    writer.append("refused", job_id=place.job_id, restart=place.restart, detail=reason)


def _start(place: NodeAllocation) -> tuple[str, int]:
    """What tells one start of a job from another."""
    return place.job_id, place.restart


def find_claim(attempts: list[Attempt], place: NodeAllocation, joined: Callable[[Attempt], bool]) -> Attempt | None:
    """The claim of this agent's own head node for this very start of the job. Pure but for `joined`."""
    if not attempts:
        return None
    newest = attempts[-1]
    same_start = (newest.job_id, newest.restart) == _start(place)
    # submitit's local executor starts a job again without counting: what this node has been in is not its claim.
    return newest if same_start and not joined(newest) else None


def join(run: RunDir, place: NodeAllocation, stopped: Callable[[], bool], timeout_seconds: float) -> Attempt | None:
    """Wait for the head node's claim; None when it was told to stop first.

    Raises:
        TorchrelayError: the head node's agent refused, or no claim came.
    """
    deadline = time.monotonic() + timeout_seconds
    while not stopped():
        refresh_nfs_cache(run.events)
        events = ledger.read(run.events)
        for event in events:
            if event["event"] == "refused" and (event["job_id"], event["restart"]) == _start(place):
                raise TorchrelayError(event["detail"])
        attempts = attempts_of(events)
        found = find_claim(attempts, place, lambda a: event_file(run, a.attempt, place.node_rank).path.exists())
        if found is not None and found.ended:
            raise TorchrelayError(f"attempt {found.attempt} ended before this node could join it")
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise TorchrelayError(f"the head node {place.head} claimed no attempt within {timeout_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return None
