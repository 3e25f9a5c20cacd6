"""Decides what the supervisor does with a run, and which state a run without a job has, from an observation. Pure.

For a run without a job, `hpc status` shows the same reason as `hpc supervise --dry-run`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from hpc.run.causes import Cause, JobState
from hpc.run.events.history import State
from hpc.run.events.kinds import Refused
from hpc.slurm.handover import HANDOVER_SECONDS
from hpc.slurm.squeue import SlurmJob
from hpc.supervise.observe import RunObservation

# The first node's agent sends a heartbeat every few seconds; storage that fails over is silent for a minute.
STALE_SECONDS = 60.0
# A running job whose agents have claimed no attempt after this time lacks its file systems or its network.
_CLAIM_SECONDS = 600.0
# Slurm takes SlurmdTimeout, 300 s, to notice that the node of an ending job is dead.
_ENDING_SECONDS = 600.0
# Agents retry for this long while the controller is down.
_AGENT_RETRY_SECONDS = 900.0
# A supervisor, even one in cron, would have continued a run within this time.
_ABANDONED_SECONDS = 600.0
# If this number of jobs in a row end before the run starts, the nodes are not the reason.
_MAX_STARTS = 5
# A shorter delay is not worth ending, because clocks differ. A longer one was requested by the user.
_MIN_DELAY_SECONDS, _MAX_DELAY_SECONDS = 30.0, 900.0
_FIRST_BACK_OFF_SECONDS = 30.0
# The cause of an attempt's end that no agent recorded, by the state of its job.
_CAUSE_OF_STATE = {
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.NODE_FAIL: Cause.NODE_FAILURE,
    JobState.PREEMPTED: Cause.PREEMPTED,
}


class Action(StrEnum):
    """An action of the supervisor."""

    KEEP = "keep"  # do nothing
    START_NOW = "start_now"  # end the delay of a requeued job
    RELEASE = "release"  # release a job that Slurm holds because it could not start it
    ALLOW_NODES = "allow_nodes"  # let a pending job use nodes that failed the run: too few others are left
    REQUEUE = "requeue"  # requeue a job that has ended
    RESUBMIT = "resubmit"  # record the attempt's end if it is missing, submit the next job, and cancel the old one
    CANCEL = "cancel"  # cancel a job that does nothing
    RECORD = "record"  # record that the user cancelled the last job with scancel: Slurm will forget it


NEVER_SUBMITTED = "hpc submit was killed before it queued the run: submit it with hpc resume"
"""Why a run has failed if neither the ledger nor Slurm's queue has a job of it."""
STARTS = frozenset({Action.START_NOW, Action.RELEASE, Action.REQUEUE, Action.RESUBMIT})
"""Actions after which a run stages its data and trains."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One action, and its reason."""

    action: Action = Action.KEEP
    reason: str
    job_id: str | None = None
    """The job that the action applies to."""
    cause: Cause | None = None
    """The cause of the attempt's end, if the ledger lacks it."""
    state: State = "pending"
    """The state of a run without a job, for `hpc status`."""
    is_final: bool = False
    """Whether the run is complete or given up, for --notify."""


def decide(run: RunObservation) -> Decision:
    """Return what to do about a run now: the decision of the first rule in `_RULES` that applies."""
    return next(decision for rule in _RULES if (decision := rule(run)))


def _keep(reason: str, state: State = "pending") -> Decision:
    return Decision(reason=reason, state=state)


def _over(reason: str, state: State) -> Decision:
    return Decision(reason=reason, state=state, is_final=True)


def _cancel(job: SlurmJob, reason: str) -> Decision:
    return Decision(action=Action.CANCEL, job_id=job.job_id, reason=reason)


def _resubmit(run: RunObservation, job: SlurmJob | None, reason: str) -> Decision:
    # Unless this start of the job made the last attempt, the job's state does not say why that attempt ended.
    cause = _missing_cause(run) if job is None or run.made_last_attempt(job) else None
    return Decision(action=Action.RESUBMIT, reason=reason, job_id=job.job_id if job else None, cause=cause)


def _missing_cause(run: RunObservation) -> Cause | None:
    return _CAUSE_OF_STATE.get(run.last_job_state, Cause.LOST) if run.end_missing else None


def _back_off(run: RunObservation, doublings: int) -> Decision | None:
    """Return the decision to wait, longer after each consecutive failure; None if the wait is over."""
    since = max(run.last.ended or 0.0 if run.last else 0.0, run.handed_over_at or 0.0)
    rest = since + _FIRST_BACK_OFF_SECONDS * 2.0**doublings - run.now if doublings >= 0 else 0.0
    return _keep(f"repeated failures: next attempt in {rest:.0f} s") if rest > 0 else None


def _finished_or_cancelled(run: RunObservation) -> Decision | None:
    """Keep a run that is complete or cancelled, and cancel a job that it still has."""
    complete = run.history.complete
    if not complete and not run.history.is_cancelled:
        return None
    end = _over("completed", "completed") if complete else _keep("cancelled", "cancelled")
    # The agents of a complete run take a moment to exit.
    exiting = complete and run.silent_seconds < HANDOVER_SECONDS
    useless = next((job for job in [*([] if exiting else run.running_jobs), run.pending_job] if job), None)
    return _cancel(useless, f"the run is {end.state}") if useless else end


def _handed_over(run: RunObservation) -> Decision | None:
    return _keep("another process is submitting the next job") if run.now < run.handover_deadline else None


def _replaced(run: RunObservation) -> Decision | None:
    """Cancel a running job that no longer works on the run, if the run has another job."""
    ended = {(attempt.job_id, attempt.restart) for attempt in run.history.attempts if attempt.ended is not None}
    others = [job for job in run.alive_jobs if job.state is not JobState.ENDING]
    for job in run.running_jobs if len(others) > 1 else ():
        claimed = any((one.job_id, one.restart) == (job.job_id, job.restarts) for one in run.history.attempts)
        waited = run.now - (job.started or run.now)
        if (job.job_id, job.restarts) in ended or (not claimed and waited > _CLAIM_SECONDS):
            return _cancel(job, "another job has replaced it")
    return None


def _unclear(run: RunObservation) -> Decision | None:
    words = {JobState.UNKNOWN: "in an unknown state", JobState.SUSPENDED: "suspended"}
    job = next((job for job in run.jobs if job.state in words), None)
    return _keep(f"job {job.job_id} is {words[job.state]}") if job else None


def _useless(run: RunObservation) -> Decision | None:
    """Cancel a job that waits although the run has failed: Slurm requeues and holds an expedited job that fails."""
    return _cancel(run.pending_job, "the run has ended, but its job waits") if run.pending_job and run.over else None


def _pending(run: RunObservation) -> Decision | None:
    """Keep a job that waits for nodes, or end its hold or delay, or allow it more nodes."""
    job, last = run.pending_job, run.last
    if job is None:
        return None
    if "launch" in job.reason.lower() and "held" in job.reason.lower():
        times = job.restarts - (last.restart + 1 if last and last.job_id == job.job_id else 0)
        if times < _MAX_STARTS:
            return Decision(action=Action.RELEASE, job_id=job.job_id, reason="Slurm could not start it on a node")
        reason = f"Slurm failed {times} times to start job {job.job_id}: type scontrol release {job.job_id}"
        return _over(reason, "failed")
    # If the job was never restarted, the user requested the delay.
    delay = (job.eligible or 0.0) - run.now if job.reason == "BeginTime" and job.restarts else 0.0
    if _MIN_DELAY_SECONDS < delay < _MAX_DELAY_SECONDS:
        reason = "requeued; waiting only for Slurm's requeue delay"
        start = Decision(action=Action.START_NOW, job_id=job.job_id, reason=reason)
        return _back_off(run, run.failures - 2) or start
    if missed := set(run.excluded) - set(run.excludable):
        reason = f"too few nodes are left without {', '.join(sorted(missed))}"
        return Decision(action=Action.ALLOW_NODES, job_id=job.job_id, reason=reason)
    return _keep(f"job {job.job_id} is pending ({job.reason})")


def _ending(run: RunObservation) -> Decision | None:
    """Wait for an ending job, but not for ever. It takes minutes if a node is dead, and may hang in the kernel."""
    alive = run.alive_jobs
    if not alive or any(job.state is not JobState.ENDING for job in alive):
        return None
    since = (run.last.ended if run.last else None) or (run.now - run.silent_seconds)
    return _keep(f"job {alive[-1].job_id} is ending") if run.now - since < _ENDING_SECONDS else None


def _starting(run: RunObservation) -> Decision | None:
    """Wait until a running job's agents claim an attempt. Replace the job if they take too long."""
    job = run.running_jobs[-1] if run.running_jobs else None
    if job is None or run.made_last_attempt(job):
        return None
    if job.job_id in run.without_first_node:
        # Slurm ends such a job only at its time limit: agents on its other nodes wait for the first node's agent.
        return _resubmit(run, job, f"{job.batch_host}, its first node, was lost before its agents started")
    waited = run.now - (job.started or run.now)
    # An agent without a claim may wait for space in the run directory, or squeue's list may be older than the ledger.
    lives = (run.end_missing or run.heartbeat_at is not None) and run.silent_seconds < STALE_SECONDS
    if waited < _CLAIM_SECONDS or lives:
        return _keep(f"job {job.job_id} is starting")
    return _resubmit(run, job, f"its agents have not started within {waited:.0f} s")


def _running(run: RunObservation) -> Decision | None:
    """Keep a job whose agents work on the last attempt or submit the next job; replace or cancel any other job."""
    job, last = run.running_jobs[-1] if run.running_jobs else None, run.last
    if job is None:
        return None
    silent = run.silent_seconds >= STALE_SECONDS
    if last is None or last.ended is None:
        if silent:
            return _resubmit(run, job, f"no heartbeat from its agents for {run.silent_seconds:.0f} s")
        return _keep(f"job {job.job_id} is running")
    quiet = run.now - max(last.ended, run.handed_over_at or 0.0)
    if quiet < HANDOVER_SECONDS or (quiet < _AGENT_RETRY_SECONDS and not silent):
        return _keep(f"job {job.job_id} is ending")
    if run.over:
        return _cancel(job, "the run has ended, but its job still runs")
    return _resubmit(run, job, "the attempt ended, but its agents did not queue the next job")


def _given_up(run: RunObservation) -> Decision | None:
    if run.last is None or not run.over:
        return None
    cause = run.last.cause
    if cause == Cause.COMPLETED:
        return _over("completed", "completed")
    return _keep("cancelled", "cancelled") if cause == Cause.CANCELLED else _over(f"given up: {cause}", "failed")


def _just_ended(run: RunObservation) -> Decision | None:
    """Wait for the agents' last events, which may appear late on shared storage."""
    return _keep("its job has just ended") if run.end_missing and run.silent_seconds < STALE_SECONDS else None


def _scancelled(run: RunObservation) -> Decision | None:
    reason = "its job was cancelled with scancel"
    if run.history.is_scancelled:
        return _keep(reason, "cancelled")
    # A process that hands the run over also cancels the old job.
    if run.last_job_state is not JobState.CANCELLED or run.history.unfinished_handover(run.attempt):
        return None
    cause = Cause.CANCELLED if run.end_missing else None
    return Decision(action=Action.RECORD, reason=reason, cause=cause, state="cancelled")


def _vanished(run: RunObservation) -> Decision | None:
    """Keep a run whose job is gone and made no attempt: its user may have cancelled it, or must correct a mistake."""
    state = run.last_job_state
    if run.history.last_job_id is None and not run.jobs:
        return _keep(NEVER_SUBMITTED, "failed")
    if state.alive and state is not JobState.ENDING:
        return _keep("squeue does not list its job, but Slurm's accounting does")
    unknown = state is JobState.UNKNOWN and (run.last is None or run.handed_over_at is not None)
    failed = run.last is None and state not in {JobState.UNKNOWN, JobState.NODE_FAIL}
    # A process that hands the run over also cancels the old job.
    if (not unknown and not failed) or run.history.unfinished_handover(run.attempt):
        return None
    refused = [event for event in run.history.of(Refused) if event.job_id == run.history.last_job_id]
    if refused:
        return _keep(f"its job started nothing: {refused[-1].detail}: correct that, then type hpc resume", "failed")
    reason = f"{_gone(run)}, and its agents had not started: see the job's log in logs/, then type hpc resume"
    return _keep(reason, "failed")


def _gone(run: RunObservation) -> str:
    state = run.last_job_state
    return "its job is gone" if state is JobState.UNKNOWN else f"its job is gone ({state.lower()})"


def _never_starts(run: RunObservation) -> Decision | None:
    # Restarts count, too, because Slurm itself requeues a job whose node fails.
    times = max([run.queued_jobs, *(job.restarts for job in run.jobs if run.last is None)])
    gave_up = f"given up: its job ended {times} times before it started"
    return _over(gave_up, "failed") if times >= _MAX_STARTS else None


def _ended(run: RunObservation) -> Decision:
    """Start another job after one that ended, or that Slurm lost."""
    if back_off := _back_off(run, max(run.failures - 2, run.queued_jobs - 1)):
        return back_off
    job = run.jobs[-1] if run.jobs else None
    if run.last_job_state is JobState.NODE_FAIL and job and job.state is JobState.NODE_FAIL:
        reason, cause = "a node failed", _missing_cause(run)
        found = Decision(action=Action.REQUEUE, job_id=job.job_id, cause=cause, reason=reason)
    else:
        found = _resubmit(run, None, _gone(run))
    return replace(found, state="failed" if run.idle_seconds > _ABANDONED_SECONDS else "pending")


_RULES: tuple[Callable[[RunObservation], Decision | None], ...] = (
    _finished_or_cancelled, _handed_over, _replaced, _unclear,
    # Rules for a run with a job.
    _useless, _pending, _ending, _starting, _running,
    # Rules for a run without a job.
    _given_up, _just_ended, _scancelled, _vanished, _never_starts, _ended,
)  # fmt: skip
