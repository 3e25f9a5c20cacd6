"""How an attempt ended, and whether the run goes on. Runs on compute nodes, in the head node's agent."""

import time
from dataclasses import replace

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc.core import ledger
from hpc.core.attempts import attempts_of, failures_in_a_row
from hpc.core.errors import TorchrelayError
from hpc.core.files import refresh_nfs_cache
from hpc.core.outcome import Cause, Ending, JobState, cause_of, may_restart, must_requeue
from hpc.slurm import client as slurm
from hpc.slurm import relaunch
from jobs.context import AgentContext
from jobs.control.channel import LOST_SECONDS, ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.messages import OVER
from jobs.ending.failover import end, hand_over, requeue, save_snapshot
from jobs.log import log

_POLL_SECONDS = 0.2
# The others have killed their ranks within seconds; one that does not say so is stuck.
_OTHERS_SECONDS = 60.0
# Longer than Slurm takes to notice a dead node, unless the administrators have changed that (SlurmdTimeout, 300 s).
_RECENT_SECONDS = 900.0


def conclude(node: AgentContext, hub: ControlServer, captain: Coordinator) -> int:
    """Write down how the attempt ended and see that the run goes on, if it should. Returns the exit code."""
    # Those that were lost long ago Slurm has noticed by now, or they have come back.
    recent = {rank for rank, heard in captain.lost.items() if time.time() - heard < _RECENT_SECONDS}
    lost = recent | _wait_for_others(node, hub)
    ending, fields = _look(node, captain), dict[str, object]()
    cause, verdict = cause_of(ending), captain.verdict
    if cause is not Cause.COMPLETED:
        save_snapshot(node)
    if verdict and cause is verdict.cause:
        fields = {"detail": verdict.detail, "failed_at": verdict.failed_at, "node": verdict.node, "rank": verdict.rank}
    if not end(node, cause=cause, step=_last_step(node, captain), **fields):
        return 1  # other agents, which did not hear of this one, have ended it
    said = f" ({verdict.detail})" if fields and verdict else ""
    log(f"attempt {node.attempt.attempt} ended: {cause}{said}")
    ending = replace(ending, failures=failures_in_a_row(attempts_of(ledger.read(node.run.events))))
    if must_requeue(cause, ending):
        return _go_on(node, [node.place.hostnames[rank] for rank in sorted(lost)], captain)
    return 0 if cause is Cause.COMPLETED or may_restart(cause, ending.failures) else 1


def _go_on(node: AgentContext, lost: list[str], captain: Coordinator) -> int:
    """Have another attempt started."""
    job_id = node.place.job_id
    if node.place.cluster != "slurm":
        node.note("requeued", job_id=job_id)
        return LOCAL_REQUEUE_RETURN_CODE
    unfit = [node.place.hostnames[rank] for rank in sorted(captain.unfit)]
    if lost:
        hand_over(node, lost, unfit)
        return 0
    requeue(node, unfit)
    return 0


def _wait_for_others(node: AgentContext, hub: ControlServer) -> set[int]:
    """Until nothing of the other nodes' ranks runs any more; the node ranks that fell silent instead."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while time.monotonic() < deadline:
        node.turn()
        reports = {rank: report for rank, report in hub.reports().items() if rank != node.place.node_rank}
        busy = {rank for rank, report in reports.items() if report.phase not in OVER}
        silent = {rank for rank in busy if (hub.silent_seconds(rank) or 0.0) > LOST_SECONDS}
        if busy == silent:
            return silent
        time.sleep(_POLL_SECONDS)
    return set()


def _look(node: AgentContext, captain: Coordinator) -> Ending:
    """Gather what tells how the attempt ended."""
    refresh_nfs_cache(node.run.path)
    signal = captain.signal
    finished = node.run.final_result.exists() if node.spec.train else captain.done and not signal
    events = ledger.read(node.run.events)
    fields = _show_job(node)
    return Ending(
        finished=finished,
        cancelled=any(event["event"] == "cancelled" for event in events),
        signal=signal,
        job_state=slurm.ending_state(fields, node.place.restart) if fields else JobState.RUNNING,
        preempted=slurm.is_preempted(fields),
        failure=captain.verdict.cause if captain.verdict else Cause.CRASHED,
    )


def _show_job(node: AgentContext) -> dict[str, str]:
    """What Slurm says of the job; nothing without Slurm, and while its controller does not answer."""
    if node.place.cluster == "local":
        return {}
    try:
        return slurm.show_job(node.place.job_id)
    except TorchrelayError as error:
        log(f"Slurm does not say how it ends this job: {error}")
        return {}


def _last_step(node: AgentContext, captain: Coordinator) -> int | None:
    """The last step that any rank had done: the metrics may be some steps behind."""
    if node.spec.train is None:
        return None
    stopped_at = captain.verdict.step if captain.verdict else 0
    return max(stopped_at or 0, captain.peak, relaunch.last_step(node.run) or 0)
