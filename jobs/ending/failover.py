"""How a run gets away from a job that has lost a node: the fastest way that the cluster allows. Runs on compute nodes.

A job with a dead node must not be requeued before Slurm has marked the node down: until then it stays COMPLETING, and
Slurm 22.05 then restarts it without its GPUs and leaks them. A new job for the same run can start at once, elsewhere.
"""

import time
from collections.abc import Callable

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc.core import ledger
from hpc.core.attempts import attempts_of, may_restart_after
from hpc.core.errors import TorchrelayError
from hpc.core.outcome import Cause, JobState
from hpc.slurm import client as slurm
from hpc.slurm import relaunch
from jobs.context import AgentContext
from jobs.log import log
from jobs.ranks.rendezvous import NodeAllocation
from training.checkpoint.snapshot import flush

_POLL_SECONDS, _RETRY_SECONDS = 0.5, 3.0
# Longer than a fail-over of Slurm's controller (SlurmctldTimeout, 120 s), and than Slurm takes to notice a dead node
# (SlurmdTimeout, 300 s): a job that can do nothing more should not keep its nodes for ever.
_PATIENCE_SECONDS = 900.0
# Who has a snapshot goes first: a spare waits this long.
_SPARE_SECONDS = 5.0
# A single agent that hears nothing may be cut off itself: where there are others, one of them should say the same.
_SECOND_SECONDS = 15.0
# Three calls of Slurm's clients take no longer, each with its timeout.
_SUCCESSOR_SECONDS = 100.0


def take_over(node: AgentContext) -> int:
    """The head node's agent is silent: one of the others ends the attempt and starts the next one."""
    lost_at, head = node.head_heard, node.place.head
    detail = f"{head} says nothing any more"
    log(detail)
    node.note("node_lost", node=head, last_heard=lost_at, detail=detail)
    if node.place.node_rank not in node.orders.members:
        time.sleep(_SPARE_SECONDS)
    if not _is_the_head_that_is_lost(node) or not _is_running(node):
        return 0
    step = node.last_step if node.spec.train else None
    first = end(node, cause=Cause.NODE_FAILURE, step=step, detail=detail, failed_at=lost_at, node=head)
    if node.place.cluster == "local":
        return LOCAL_REQUEUE_RETURN_CODE if first else 0
    if not first and not _is_left_undone(node):
        return 0
    save_snapshot(node)
    if may_restart_after(attempts_of(ledger.read(node.run.events))):
        hand_over(node, [head], [])
    else:
        slurm.cancel(node.place.job_id)
    return 0


def _is_the_head_that_is_lost(node: AgentContext) -> bool:
    """Whether it is not this node that is cut off."""
    deadline = time.monotonic() + _SECOND_SECONDS
    while node.place.cluster == "slurm" and time.monotonic() < deadline:
        if relaunch.has_ended(node.run, node.attempt.attempt):
            return True
        told = head_is_lost([event["node"] for event in node.events("node_lost")], node.place)
        if told is not None:
            return told
        time.sleep(_POLL_SECONDS)
    # Nobody speaks: they have died together, as the nodes of a rack do.
    return True


def head_is_lost(lost: list[str], place: NodeAllocation) -> bool | None:
    """Whether the head node is lost to all that are left, or only to one that is cut off itself. Pure.

    Args:
        lost: the nodes that agents do not hear any more, a name for each who says so; this one has said it of the head.
        place: of this agent.

    Returns:
        None if it takes another agent to tell.
    """
    if place.host in lost:
        return False
    others = set(place.hostnames) - {place.host, *lost}
    return True if not others or lost.count(place.head) > 1 else None


def _is_left_undone(node: AgentContext) -> bool:
    """Whether the agent that ended the attempt has died before it saw to the next one."""
    deadline = time.monotonic() + _SUCCESSOR_SECONDS
    while time.monotonic() < deadline:
        if (
            node.events("relaunched")
            or node.events("requeued")
            or not may_restart_after(attempts_of(ledger.read(node.run.events)))
        ):
            return False
        time.sleep(_POLL_SECONDS)
    return _is_running(node)


def _is_running(node: AgentContext) -> bool:
    """Whether Slurm is not ending the job itself. One that does not answer ends nothing."""
    if node.place.cluster == "local":
        return True
    try:
        job = slurm.jobs().get(node.place.job_id)
    except TorchrelayError as error:
        log(f"Slurm does not say how the job is: {error}")
        return True
    return job is not None and job.state is JobState.RUNNING


def end(agent: AgentContext, **fields: object) -> bool:
    """Write down that the attempt has ended; False if another agent has.

    A full disk does not keep it from ending; then the first that is left decides.
    """
    try:
        return relaunch.record_end(agent.run, agent.attempt.attempt, **fields)
    except OSError as error:
        log(f"the end of the attempt could not be recorded: {error}")
        return agent.place.node_rank <= 1


def save_snapshot(node: AgentContext) -> None:
    """Make the newest snapshot of this node a checkpoint, if it is newer than those; else it stays in memory."""
    began = time.monotonic()
    try:
        step = flush(node.memory, node.run)
    except (OSError, TorchrelayError) as error:
        log(f"the newest snapshot stays in the memory of {node.place.host}, it could not be saved: {error}")
        node.unsaved = True
        return
    if step is not None:
        node.note("flushed", step=step, seconds=round(time.monotonic() - began, 3))


def hand_over(node: AgentContext, lost: list[str], unfit: list[str]) -> None:
    """Requeue the job, if Slurm knows that the lost nodes are dead; otherwise submit a new one and end this one.

    Args:
        node: this one.
        lost: names of nodes that are silent.
        unfit: names of other nodes to avoid.

    Raises:
        TorchrelayError: neither was possible.
    """

    def leave() -> None:
        # Some clusters take no jobs from their compute nodes: then Slurm has to notice first.
        if _are_dead(lost):
            slurm.requeue(node.place.job_id)
            node.note("requeued", job_id=node.place.job_id)
        else:
            _relaunch(node, [*lost, *unfit])

    if relaunch.claim_next_job(node.run, node.attempt.attempt, ledger.read(node.run.events)):
        _persist(leave)


def requeue(node: AgentContext, unfit: list[str]) -> None:
    """Requeue the job, and keep it from some nodes.

    Raises:
        TorchrelayError: it was refused.
    """
    job_id = node.place.job_id
    _persist(lambda: slurm.requeue(job_id))
    node.note("requeued", job_id=job_id)
    if unfit:
        excluded = relaunch.nodes_to_exclude(node.spec, ledger.read(node.run.events), unfit)
        _persist(lambda: slurm.set_excluded_nodes(job_id, excluded))  # nothing can be changed before the requeue
        node.note("excluded", job_id=job_id, excluded=excluded)


def _persist(ask: Callable[[], None]) -> None:
    """Ask Slurm until it does what it is asked for: its controller is silent for minutes when it fails over.

    Raises:
        TorchrelayError: it refused to the end.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except TorchrelayError as error:
            if time.monotonic() > deadline:
                raise
            log(f"the run cannot go on yet, trying again: {error}")
            time.sleep(_RETRY_SECONDS)


def _relaunch(node: AgentContext, avoid: list[str]) -> None:
    """Submit a new job for the run, and end this one.

    Raises:
        TorchrelayError: it was refused.
    """
    job_id, events = node.place.job_id, ledger.read(node.run.events)
    excluded = relaunch.nodes_to_exclude(node.spec, events, avoid)
    new = relaunch.submit_next_job(node.run, node.spec, excluded, {attempt.job_id for attempt in attempts_of(events)})
    node.note("relaunched", job_id=new, old_job_id=job_id, excluded=excluded)
    log(f"job {new} goes on, this one ends")
    try:
        slurm.cancel(job_id)
    except TorchrelayError as error:
        log(f"type scancel {job_id}: it does nothing any more, and could not be ended: {error}")


def _are_dead(names: list[str]) -> bool:
    """Whether Slurm knows it."""
    return set(slurm.dead_nodes(names)) == set(names)
