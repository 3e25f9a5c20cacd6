"""Starts the next attempt of a run: requeues this job, or submits a new one. Runs on compute nodes.

Slurm holds a requeued job, by default for two minutes; a new job may start at once.

A job with a dead node must not be requeued before Slurm has marked the node down: until then it stays COMPLETING, and
Slurm 22.05 then restarts it without its GPUs and leaks them. A new job for the same run can start at once, elsewhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from hpc.base.errors import TorchrelayError
from hpc.run.events.kinds import Excluded, NotContinued, Requeued, Resubmitted
from hpc.run.events.resumption import is_cancelled_now
from hpc.slurm import bad_nodes, handover, job_fields, sinfo, squeue
from hpc.slurm import client as slurm
from hpc.slurm.predecessors import redirect_waiting_jobs
from jobs.node_attempt import NodeAttempt, ask_slurm, log

# Longer than Slurm takes to notice a dead node (SlurmdTimeout, 300 s unless the administrators have changed it) or to
# fail over its controller (SlurmctldTimeout, 120 s). After that, a job that can do nothing must not keep its nodes.
SLURM_SECONDS = 900.0
# Slurm marks a dead node down after SlurmdTimeout, usually 300 s. A node that stays up for longer is alive.
_DOWN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class LostNodes:
    """The nodes that the next attempt avoids."""

    lost: Sequence[str] = ()
    """Nodes whose agents have fallen silent."""
    alive: Sequence[str] = ()
    """Lost nodes that are not dead: their kernel has closed the connection of the ended agent."""
    bad: Sequence[str] = ()
    """Nodes that have failed the preflight, or whose storage or device hangs."""
    died_since: Callable[[], Sequence[str]] = tuple
    """Returns the nodes that have died since the end of the attempt, while Slurm did not answer."""


def start_next_attempt(node: NodeAttempt, nodes: LostNodes) -> bool:
    """Ask Slurm to start the next attempt, away from the lost and bad nodes: requeue this job, or submit a new one.

    If nodes are lost, or Slurm would hold a requeued job, try a new job first. If Slurm refuses one of the two for
    good, try the other: some clusters allow no requeues, others no jobs from their compute nodes, or no second job. If
    it refuses both, end this job and then replace it. Returns False if the run stops here.
    """
    dead = set(nodes.lost) - set(nodes.alive)
    avoid = [*nodes.lost, *nodes.bad]
    why_new = f"{', '.join(nodes.lost)} lost" if nodes.lost else _why_new_job(node)
    claim = cache(partial(_claim, node))
    requeue, submit, end_first = "requeue this job", "accept a new job", "accept a new job after the end of this one"
    ways = {
        requeue: partial(_requeue, node, avoid),
        submit: partial(_resubmit, node, avoid, why_new),
        end_first: partial(_end_and_resubmit, node, avoid, why_new),
    }
    left = [submit, requeue, end_first] if why_new else [requeue, submit, end_first]

    down_by = time.monotonic() + _DOWN_SECONDS

    def ask() -> bool:
        if is_cancelled_now(node.run):  # while Slurm did not answer
            log("the run was cancelled: this job ends")
            return False
        died = set(nodes.died_since())
        avoid.extend(died.difference(avoid))
        dead.update(died)
        may_be_dead = dead and time.monotonic() < down_by
        for what in list(left):
            if (what == requeue and may_be_dead and _holds(node, dead)) or (what == end_first and len(left) > 1):
                continue
            if (why_new or what != requeue) and not claim():
                return True  # another process continues the run
            try:
                ways[what]()
            except slurm.SlurmRefusalError as error:
                left.remove(what)
                log(f"Slurm refuses to {what}: {error}")
            else:
                return True
        if not left:
            raise slurm.SlurmRefusalError("Slurm refused both the requeue and a new job")
        raise TorchrelayError(f"Slurm has not yet marked {', '.join(sorted(dead))} down")

    try:
        return ask_slurm(ask, SLURM_SECONDS)
    except (TorchrelayError, OSError) as error:
        log(f"the run stops here ({error}): on the login node, start hpc supervise, or type hpc resume {node.run.path}")
        node.record(NotContinued(detail=str(error)))
        return False


def replace_requeued_job(node: NodeAttempt, nodes: LostNodes) -> None:
    """Submit a new job if it may start sooner than this one, which Slurm itself requeues after its end."""
    why = _why_new_job(node)
    try:
        if why and _claim(node):
            _resubmit(node, [*nodes.lost, *nodes.bad], why)
    except (TorchrelayError, OSError) as error:
        log(f"the run continues when Slurm starts this job again, because Slurm accepts no new job: {error}")
        node.record(Requeued(job_id=node.allocation.job_id))


def _claim(node: NodeAttempt) -> bool:
    """Claim the next job. Returns False if another process continues the run, or if it may not restart after all."""
    for ended in node.unrecorded_ends:  # without this record, the next job would take the attempt for one that runs
        handover.record_end(node.run, ended)
    history = node.history()
    if node.unrecorded_ends and not history.may_restart:
        return False
    return handover.claim_next_job(node.run, node.attempt.attempt, history)


def _why_new_job(node: NodeAttempt) -> str | None:
    """Return why the run should continue in a new job although it has lost no node; None if a requeue is better."""
    if node.spec.recovery.continue_with != "auto":
        return "--continue-with job" if node.spec.recovery.continue_with == "job" else None
    try:
        job = slurm.show_job(node.allocation.job_id)
        if job_fields.is_shortened(job, node.spec.resources.time_limit.minutes):
            return f"this job's time limit is {job['TimeLimit']} (--time-min), and a requeue would keep it"
        if job_fields.is_expedited(job):
            return None
        delay = slurm.requeue_delay_seconds(slurm.show_config())
    except TorchrelayError as error:
        return f"Slurm does not report for how long it holds a requeued job: {error}"
    return f"Slurm holds a requeued job for {delay} s" if delay > slurm.LONG_REQUEUE_DELAY_SECONDS else None


def _holds(node: NodeAttempt, dead: set[str]) -> bool:
    """Return whether the job still has a dead node that Slurm has not marked down.

    A node that does not answer Slurm counts as dead: it may have died after the agents noticed the `dead` ones.
    """
    held = dead - set(sinfo.dead_nodes(sorted(dead))) | sinfo.silent_nodes(node.allocation.hostnames)
    job = squeue.jobs().get(node.allocation.job_id) if held else None
    # A dead node that has been rebooted is not down any more, but no longer belongs to the job.
    return job is not None and not held.isdisjoint(slurm.hostnames(job.nodes))


def _requeue(node: NodeAttempt, avoid: list[str]) -> None:
    job_id = node.allocation.job_id
    slurm.requeue(job_id)
    node.record(Requeued(job_id=job_id))
    if not avoid:
        return
    try:
        excluded = bad_nodes.nodes_to_exclude(node.run, node.spec, avoid)
        # Do this after the requeue, because Slurm changes the excluded nodes only of a pending job.
        ask_slurm(lambda: slurm.update(job_id, ExcNodeList=",".join(excluded)), SLURM_SECONDS)
    except (OSError, TorchrelayError) as error:  # if raised, the caller would requeue again
        log(f"job {job_id} may start on {', '.join(avoid)} again: {error}")
    else:
        node.record(Excluded(job_id=job_id, excluded=tuple(excluded)))


def _resubmit(node: NodeAttempt, avoid: list[str], why: str | None) -> None:
    job_id, history, this = node.allocation.job_id, node.history(), node.attempt.attempt
    excluded = bad_nodes.nodes_to_exclude(node.run, node.spec, avoid)
    old = {attempt.job_id for attempt in history.attempts if attempt.attempt <= this}
    # An earlier sbatch may have queued a job although its reply was lost; that job may have begun the next attempt.
    begun = (attempt.job_id for attempt in history.attempts if attempt.attempt > this)
    new = next(begun, None) or handover.submit_next_job(node.run, node.spec, excluded, old)
    node.record(Resubmitted(job_id=new, old_job_id=job_id, excluded=tuple(excluded), detail=why))
    redirect(node, (job_id, new))
    if is_cancelled_now(node.run):  # `hpc cancel` may have looked for jobs before sbatch
        log(f"the run was cancelled: job {new} and this one end")
        end_job(new)
    else:
        log(f"the run continues in job {new}; this one ends" + (f" ({why})" if why else ""))
    end_job(job_id)


def redirect(node: NodeAttempt, replaced: tuple[str, str] | None = None) -> None:
    """Make jobs that wait for this run wait for its new job, or let them start if the run has ended.

    `replaced` are the ids of the old and the new job; None if there is no new job.
    """
    try:
        redirect_waiting_jobs(node.run, replaced)
    except (OSError, TorchrelayError) as error:
        log(f"jobs that wait for this run may start too early, or stay held: {error}")


def _end_and_resubmit(node: NodeAttempt, avoid: list[str], why: str | None) -> None:
    """End this job, and submit a new one in the seconds (KillWait) that Slurm leaves its processes.

    Limits such as MaxSubmitJobs=1 count a job until it is cancelled.
    """
    log("this job ends so that Slurm accepts a new one")
    slurm.cancel(node.allocation.job_id)
    _resubmit(node, avoid, why)


def end_job(job_id: str) -> None:
    """End a job of the run that can do nothing more, so that it does not keep its nodes."""
    try:
        ask_slurm(lambda: slurm.cancel(job_id), SLURM_SECONDS)
    except TorchrelayError as error:
        log(f"job {job_id} has nothing left to do but could not be cancelled: type scancel {job_id} ({error})")
