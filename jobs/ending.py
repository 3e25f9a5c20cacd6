"""Ends an attempt, and continues the run if it may restart. Runs on compute nodes.

The first node's agent concludes the attempt (`conclude`). If the first node is lost, exactly one other agent takes over
(`take_over`).
"""

import functools
import time
from typing import Any

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc.base.errors import TorchrelayError
from hpc.base.files import modified
from hpc.base.kernel import steady_time
from hpc.run.causes import Cause, Ending, JobState, cause_of
from hpc.run.events.kinds import (
    AttemptEnded,
    Joined,
    NodeLost,
    NotContinued,
    Requeued,
    Resubmitted,
    Resubmitting,
    SnapshotSaved,
)
from hpc.run.events.ledger import check_is_newest
from hpc.run.events.resumption import is_cancelled_now
from hpc.run.nodedir import NodeDir, node_dirs
from hpc.run.restart_budget import must_requeue, signature_of
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import handover, job_fields, squeue
from jobs import claim
from jobs.control.channel import ControlClient, ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.messages import OVER, Phase
from jobs.next_attempt import SLURM_SECONDS, LostNodes, end_job, redirect, replace_requeued_job, start_next_attempt
from jobs.node_attempt import NodeAllocation, NodeAttempt, await_storage, log, send_heartbeats
from jobs.ranks.left_out_files import find_left_out
from jobs.ranks.monitor import NodeMonitor
from jobs.senders import notify
from training.checkpoint.snapshot import save_newest_as_checkpoint

_POLL_SECONDS, _LOOK_SECONDS = 0.2, 15.0
# Longer than _POLL_SECONDS: in a job of hundreds of nodes, every survivor reads the event files of all nodes.
_CONFIRM_POLL_SECONDS = 0.5
# The other nodes kill their ranks within seconds. A node that has not done so within this time is stuck.
_OTHERS_SECONDS = 60.0
# The node that saves its snapshot as a checkpoint copies it to shared storage, which may be 100 GB.
_SAVER_SECONDS = 900.0
# A spare waits this long, so that a node with a snapshot takes over first.
_SPARE_SECONDS = 5.0
# An agent that has lost contact may itself be cut off, so it waits this long for another agent to confirm the loss.
_CONFIRM_SECONDS = 15.0


# --- the first node's agent ---


def conclude(node: NodeAttempt, server: ControlServer, monitor: NodeMonitor, coordinator: Coordinator) -> int:
    """Record how the attempt ended, and continue the run if it may restart. Returns the exit code."""
    # Leave out nodes lost earlier: Slurm has noticed their loss, or they have come back.
    recent = {rank for rank, last_heard in coordinator.lost.items() if steady_time() - last_heard < SLURM_SECONDS}
    # A node that has not joined may have died before it could.
    absent = set(range(node.allocation.num_nodes)) - server.statuses().keys() - {node.allocation.node_rank}
    lost = recent | absent | coordinator.stuck | _wait_for_others(node, server, monitor)
    if coordinator.run_is_gone:
        log(f"{node.run.path} was deleted, moved or replaced while the run used it: this job ends")
        if node.on_slurm:
            end_job(node.allocation.job_id)
        return 1
    failure = coordinator.failure
    fields = dict[str, Any]()
    if not _is_finished(node, coordinator.signal, done=coordinator.done):
        # Save before asking Slurm: it may take half a minute to answer, and may end the job meanwhile.
        save_snapshot(node, monitor.node_dir)
    ending = _inspect_ending(
        node, coordinator.signal, Cause(failure.cause if failure else Cause.CRASHED), done=coordinator.done
    )
    cause = cause_of(ending)
    last_step = None
    counted = None if node.reports_steps else coordinator.counted.done
    if node.reports_steps:
        # Take the last step that any rank has done, because the metrics may be some steps behind.
        failed_step = failure.step if failure else 0
        logged_step = handover.last_step(node.run, node.attempt.attempt)
        last_step = max(failed_step or 0, coordinator.last_step, logged_step or 0)
    if failure and cause is failure.cause:
        fields = {key: getattr(failure, key) for key in ("failed_at", "node", "rank", "signature")}
        advice = find_left_out(node.run, node.spec, failure.detail or "")
        fields["detail"] = f"{failure.detail}: {advice}" if advice else failure.detail
        # Record the failure's own step, because it has decided whether the run may restart.
        last_step = last_step if failure.step is None else failure.step
        counted = failure.counted_steps or counted
    ended = AttemptEnded(attempt=node.attempt.attempt, cause=cause, step=last_step, counted_steps=counted, **fields)
    if not record_end(node, ended):
        return 1  # other agents, which have lost contact with this one, have ended the attempt
    log(f"attempt {node.attempt.attempt} ended: {cause}" + (f" ({fields['detail']})" if fields else ""))
    names, own = node.allocation.names, node.allocation.node_rank
    others = server.statuses().keys() - coordinator.lost.keys() - {own}

    def died_since() -> list[str]:
        return names({rank for rank in others if server.is_silent(rank) and not server.has_ended(rank)})

    alive = {rank for rank in lost if server.has_ended(rank)}  # their agents have ended, but the nodes live
    # Slurm may have taken half a minute to answer: a node may have died meanwhile.
    gone = sorted({*names(lost), *died_since()})
    nodes = LostNodes(lost=gone, alive=names(alive), bad=names(coordinator.bad_nodes), died_since=died_since)
    return _continue_run(node, cause, ending.job_state, nodes)


def conclude_failed_agent(node: NodeAttempt, failure: Cause, detail: str, signal: str | None = None) -> int:
    """Conclude the attempt on behalf of a first node's agent that has failed. Returns the exit code.

    `failure` is the cause to record, unless the run is finished, or the user or Slurm ended the attempt. `signal` is
    the one that asked the agent to stop, if one did.
    """
    ending = _inspect_ending(node, signal, failure)
    cause = cause_of(ending)
    number = node.attempt.attempt
    step = (handover.last_step(node.run, number) or 0) if node.reports_steps else None
    # Agents that recorded nothing may end for another reason each time, so such ends do not count as the same failure.
    signature = None if failure is Cause.LOST else signature_of(detail)
    blamed = node.host if cause is failure else None
    ended = AttemptEnded(attempt=number, cause=cause, step=step, detail=detail, node=blamed, signature=signature)
    if not record_end(node, ended):
        return 1
    log(f"attempt {node.attempt.attempt} ended: {cause} ({detail})")
    for node_dir in node_dirs(node.run.path) if cause is not Cause.COMPLETED else ():
        save_snapshot(node, node_dir)
    lost = node.reported_lost()
    if cause is Cause.LOST:
        # srun also fails if a node has died that Slurm still believes alive; then the job must not be requeued.
        joined = {event.node for event in node.history().during(number).of(Joined)}
        lost = [*lost, *(name for name in node.allocation.hostnames if name not in {*joined, *lost, node.host})]
    bad = [blamed] if blamed and cause in {Cause.BAD_NODE, Cause.LOST} else []
    return _continue_run(node, cause, ending.job_state, LostNodes(lost=lost, bad=bad))


def continue_ended_run(node: NodeAttempt, cause: Cause) -> int:
    """Continue a run whose agents recorded the attempt's end, but were then killed. Returns the exit code."""
    log(f"attempt {node.attempt.attempt} ended: {cause}, and its agents were killed before the run went on")
    return _continue_run(
        node, cause, _inspect_ending(node, None, cause).job_state, LostNodes(lost=node.reported_lost())
    )


def _continue_run(node: NodeAttempt, cause: Cause, job_state: JobState, nodes: LostNodes) -> int:
    exit_code = _start_next(node, cause, job_state, nodes)
    notify(node)
    return exit_code


def _start_next(node: NodeAttempt, cause: Cause, job_state: JobState, nodes: LostNodes) -> int:
    may_restart = node.history().may_restart
    if not must_requeue(cause, job_state, may_restart=may_restart):
        if may_restart and cause is Cause.PREEMPTED and node.on_slurm:
            replace_requeued_job(node, nodes)
        if not may_restart and node.on_slurm:
            redirect(node)
        return 0 if cause is Cause.COMPLETED or may_restart else 1
    if not node.on_slurm:
        node.record(Requeued(job_id=node.allocation.job_id))
        return LOCAL_REQUEUE_RETURN_CODE
    return 0 if start_next_attempt(node, nodes) else 1


def _wait_for_others(node: NodeAttempt, server: ControlServer, monitor: NodeMonitor) -> set[int]:
    """Wait until the others have ended their ranks, and one has saved its snapshot. Returns the silent nodes.

    Returns none after a minute, or after 15 minutes if the node that saves has not ended.
    """
    began = time.monotonic()
    while True:
        monitor.poll()
        own = node.allocation.node_rank
        busy = {rank for rank, status in server.statuses().items() if rank != own and status.phase not in OVER}
        silent = {rank for rank in busy if server.is_silent(rank)}
        if busy == silent:
            return silent
        saves = server.directive.saver in busy - silent
        if time.monotonic() - began > (_SAVER_SECONDS if saves else _OTHERS_SECONDS):
            return set()
        time.sleep(_POLL_SECONDS)


def _is_finished(node: NodeAttempt, signal: str | None, *, done: bool) -> bool:
    node.run.refresh_result()
    return node.run.final_result.exists() if node.spec.program.writes_result else done and not signal


def _inspect_ending(node: NodeAttempt, signal: str | None, failure: Cause, *, done: bool = False) -> Ending:
    fields = dict[str, str]()
    try:
        fields = slurm.show_job(node.allocation.job_id) if node.on_slurm else fields
    except TorchrelayError as error:
        log(f"Slurm does not report the state of this job: {error}")
    state = job_fields.ending_state(fields, node.allocation.restart) if fields else JobState.RUNNING
    preempted = job_fields.is_preempted(fields) or handover.was_preempted(node.run, node.attempt)
    if preempted and state is JobState.CANCELLED:
        preempted = not handover.was_scancelled(node.run, node.attempt)
    if state is JobState.CANCELLED:
        history, job_id = node.history(), node.allocation.job_id
        this = history.during(node.attempt.attempt).events
        # The supervisor may have replaced this job while it was pending, so before this attempt.
        was_replaced = any(event.old_job_id == job_id for event in history.of(Resubmitted))
        if was_replaced or any(isinstance(event, Resubmitting | Resubmitted) for event in this):
            state = JobState.PENDING  # a process that submits the run's next job has ended this one
    return Ending(
        finished=_is_finished(node, signal, done=done),
        cancelled=is_cancelled_now(node.run),
        signal=signal,
        job_state=state,
        preempted=preempted,
        failure=failure,
    )


# --- another node's agent, after the first node is lost ---


def take_over(node: NodeAttempt, channel: ControlClient, monitor: NodeMonitor) -> int:
    """End the attempt whose first node is lost, and start the next one, unless another agent does.

    Returns the exit code.
    """
    failed_at = steady_time() - channel.silent_seconds
    host = node.allocation.first_node
    detail = f"lost contact with {host}"
    log(detail)
    node.record(NodeLost(node=host, last_heard=failed_at, detail=detail))
    if node.allocation.node_rank not in channel.directive.members:
        time.sleep(_SPARE_SECONDS)
    has_yielded = not _confirm_first_node_is_lost(node)
    if has_yielded:
        # The first node's agent goes on without this node, but it may be cut off from Slurm, or die with its node.
        channel.report(phase=Phase.LEFT)
        if not _is_left_undone(node):
            _end_replaced_job(node, monitor)
            return 0
    if not _is_running(node):
        # Slurm is ending the job, and the next one cannot read the snapshots in the memory of these nodes.
        save_snapshot(node, monitor.node_dir)
        return 0
    step = monitor.last_step if node.reports_steps else None
    cause = Cause.CANCELLED if is_cancelled_now(node.run) else Cause.NODE_FAILURE
    number = node.attempt.attempt
    ended = AttemptEnded(
        attempt=number, cause=cause, step=step, detail=detail, failed_at=failed_at, node=host,
        counted_steps=None if node.reports_steps else monitor.counted_steps,
    )  # fmt: skip
    first = record_end(node, ended)
    if not node.on_slurm:
        return LOCAL_REQUEUE_RETURN_CODE if first and cause is Cause.NODE_FAILURE else 0
    if not first and not has_yielded and not _is_left_undone(node):
        _end_replaced_job(node, monitor)
        return 0
    # A large snapshot may take minutes to save; without a heartbeat the supervisor would end this job meanwhile.
    send_heartbeats(node.run)
    save_snapshot(node, monitor.node_dir)
    nodes = LostNodes(lost=[host], alive=[host] if channel.first_node_has_ended else [])
    if not node.history().may_restart or not start_next_attempt(node, nodes):
        end_job(node.allocation.job_id)
    notify(node)
    return 0


def replace_job_without_first_node(run: RunDir, spec: RunSpec, allocation: NodeAllocation, detail: str) -> int:
    """Replace a job whose first node was lost before its agent claimed an attempt. Returns the exit code.

    Raises:
        TorchrelayError: another agent or the supervisor replaces it, or the run was cancelled.
    """
    log(detail)
    # No rank has started in this job, so even with --start-once another one may follow.
    attempt = claim.claim_next(run, allocation, port=0, secret="")
    node = NodeAttempt(run=run, spec=spec, allocation=allocation, attempt=attempt)
    step = 0 if spec.program.reports_steps else None
    ended = AttemptEnded(
        attempt=attempt.attempt, cause=Cause.NODE_FAILURE, step=step, detail=detail, node=allocation.first_node
    )
    if record_end(node, ended):
        if not start_next_attempt(node, LostNodes(lost=[allocation.first_node])):
            end_job(node.allocation.job_id)
        notify(node)
    return 0


def _confirm_first_node_is_lost(node: NodeAttempt) -> bool:
    """Wait up to 15 s for others' reports. Return True if the first node is lost, False if this node is cut off."""
    deadline = time.monotonic() + _CONFIRM_SECONDS
    while node.on_slurm and time.monotonic() < deadline:
        if handover.has_ended(node.run, node.attempt.attempt):
            return True
        confirmed = first_node_is_lost(node.reported_lost(), node.allocation)
        if confirmed is not None:
            return confirmed
        time.sleep(_CONFIRM_POLL_SECONDS)
    # No other agent reports a loss, so all others have died together, as the nodes of a rack do.
    return True


def first_node_is_lost(lost: list[str], allocation: NodeAllocation) -> bool | None:
    """Return whether the first node is lost: False if this node is cut off, None if no other agent confirms it. Pure.

    `lost` names a node once for each agent that has reported its loss. One report of the first node is this agent's.
    """
    if allocation.host in lost:
        return False
    others = set(allocation.hostnames) - {allocation.host, *lost}
    return True if not others or lost.count(allocation.first_node) > 1 else None


def await_loss_of_first_node(node: NodeAttempt) -> bool:
    """Wait until Slurm reports that the job has lost its first node, whose agent this agent has never reached.

    Returns False if an agent has ended the attempt, or if Slurm reports no loss within 15 minutes.
    """
    deadline = time.monotonic() + SLURM_SECONDS
    while node.on_slurm and time.monotonic() < deadline and not handover.has_ended(node.run, node.attempt.attempt):
        if claim.has_lost_first_node(node.allocation):
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _is_left_undone(node: NodeAttempt) -> bool:
    """Return whether this job runs, but no other agent continues the run: heartbeats stopped, or an agent gave up."""
    heartbeat, deadline = None, time.monotonic() + handover.HANDOVER_SECONDS
    while time.monotonic() < deadline:
        history = node.history()
        this = history.during(node.attempt.attempt).events
        if any(isinstance(event, Resubmitted | Requeued) for event in this) or not history.may_restart:
            return False
        if any(isinstance(event, NotContinued) for event in this):
            break
        if any(isinstance(event, AttemptEnded) for event in this) and not _is_running(node):
            return False  # Slurm is ending the job, and kills agents that stay
        if (newest := modified(node.run.alive)) != heartbeat:
            heartbeat, deadline = newest, time.monotonic() + handover.HANDOVER_SECONDS
        time.sleep(handover.HANDOVER_SECONDS / 20)
    return _is_running(node)


def _end_replaced_job(node: NodeAttempt, monitor: NodeMonitor) -> None:
    """End this job if the first node died after it had submitted the next job, but before it could end this one.

    Slurm would keep a job with some live nodes until its time limit, and the next job waits for those nodes.
    """
    if not any(isinstance(event, Resubmitted) for event in node.history().during(node.attempt.attempt).events):
        return
    # An agent that is alive first redirects the jobs that wait for this run. When it has ended this job, Slurm asks
    # this agent to stop, and keeps the nodes until all agents have ended.
    deadline = time.monotonic() + _CONFIRM_SECONDS
    while time.monotonic() < deadline:
        if monitor.stop and not _is_running(node):
            return
        time.sleep(_CONFIRM_POLL_SECONDS)
    if _is_running(node):
        end_job(node.allocation.job_id)


def _is_running(node: NodeAttempt) -> bool:
    """Return whether the job runs and is not ending. A Slurm that does not answer ends no job, so return True then."""
    if not node.on_slurm:
        return True
    try:
        job = squeue.jobs().get(node.allocation.job_id)
    except TorchrelayError as error:
        log(f"Slurm does not report the state of this job: {error}")
        return True
    return job is not None and job.state is JobState.RUNNING


# --- any node's agent ---


def record_end(node: NodeAttempt, ended: AttemptEnded) -> bool:
    """Record the end of the attempt. Returns False if another agent has recorded one.

    A full disk must not keep the run from continuing: if the record cannot be written, node ranks 0 and 1 get True. The
    record of a completion, however, waits for space, because a script would train again without it.
    """
    record = functools.partial(handover.record_end, node.run, ended)
    try:
        is_first = await_storage(node.run, lambda: False, record) if ended.cause is Cause.COMPLETED else record()
    except OSError as error:
        log(f"the end of the attempt could not be recorded: {error}")
        node.unrecorded_ends.append(ended)
        is_first = node.allocation.node_rank <= 1
    if is_first:
        node.share(ended)
    return is_first


def save_snapshot(node: NodeAttempt, node_dir: NodeDir) -> None:
    """Save this node's newest snapshot as a checkpoint unless a checkpoint is as new. On errors, keep it in memory."""
    began = time.monotonic()
    try:
        check = functools.partial(check_is_newest, node.run, node.attempt.attempt)
        step = save_newest_as_checkpoint(node_dir, node.run, check)
    except (OSError, TorchrelayError) as error:
        log(f"the newest snapshot could not be saved and stays in the memory of {node.host}: {error}")
        node.has_unsaved_snapshot.set()
        return
    if step is not None:
        node.record(SnapshotSaved(step=step, seconds=round(time.monotonic() - began, 3)))
