"""What the supervisor does about a run: pure, from what is known of the run to one action and its reason."""

from collections.abc import Callable

from hpc.core.outcome import Cause, JobState
from hpc.slurm.squeue import SlurmJob
from hpc.supervise.decision import Action, Decision, RunObservation

# The head node's agent gives a sign of life every few seconds; storage that fails over is silent for a minute.
STALE_SECONDS = 60.0
# What an agent, or another supervisor, has begun is done by then: three calls of Slurm's clients, with their timeouts.
BUSY_SECONDS = 100.0
# A job that runs, and whose agent has not claimed an attempt: its file systems are not there, or its network. So long
# may a job be ending, too: Slurm takes SlurmdTimeout, 300 s, to notice that its node is dead.
_CLAIM_SECONDS = _ENDING_SECONDS = 600.0
# Agents ask a controller that is away for so long.
_AGENTS_SECONDS = 900.0
# Jobs that end before they begin, one after the other, are not the nodes' fault.
_MOST_LAUNCHES = 5
# Less than this is not worth a call, and clocks differ. More than the other is no wait of Slurm's, but its user's.
_SOON_SECONDS, _LATER_SECONDS = 30.0, 900.0
_FIRST_DELAY_SECONDS = 30.0
_BY_ITSELF = {
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.NODE_FAIL: Cause.NODE_FAILURE,
    JobState.PREEMPTED: Cause.PREEMPTED,
}


def decide(view: RunObservation) -> Decision:
    """What to do about a run now."""
    return next(decision for rule in _RULES if (decision := rule(view)))


def _keep(reason: str, news: str | None = None) -> Decision:
    return Decision(reason=reason, news=news)


def _cancel(job: SlurmJob, reason: str) -> Decision:
    return Decision(action=Action.CANCEL, job_id=job.job_id, reason=reason)


def _over(view: RunObservation) -> Decision | None:
    """A run that is complete, or was cancelled: no job of it is of use any more."""
    if not view.finished and not view.cancelled:
        return None
    word = "complete" if view.finished else "cancelled"
    # The agents of a complete run are still about to leave.
    useless = [*([] if view.finished and view.silent_seconds < BUSY_SECONDS else view.holders), view.waiting]
    job = next((job for job in useless if job), None)
    return _cancel(job, f"the run is {word}") if job else _keep(word, "completed" if view.finished else None)


def _busy(view: RunObservation) -> Decision | None:
    return _keep("another one submits its next job") if view.now < view.busy_until else None


def _strays(view: RunObservation) -> Decision | None:
    """A job that does nothing, while another one of the run is there."""
    ended = {(attempt.job_id, attempt.restart) for attempt in view.attempts if attempt.ended is not None}
    others = [job for job in view.alive_jobs if job.state is not JobState.ENDING]
    for job in view.holders if len(others) > 1 else ():
        begun = any((one.job_id, one.restart) == (job.job_id, job.restarts) for one in view.attempts)
        waited = view.now - (job.started or view.now)
        if (job.job_id, job.restarts) in ended or (not begun and waited > _CLAIM_SECONDS):
            return _cancel(job, "another job has taken its place")
    return None


def _unclear(view: RunObservation) -> Decision | None:
    words = {JobState.UNKNOWN: "in a state that this version does not know", JobState.SUSPENDED: "suspended"}
    job = next((job for job in view.jobs if job.state in words), None)
    return _keep(f"job {job.job_id} is {words[job.state]}") if job else None


def _held(view: RunObservation) -> Decision | None:
    """A job that Slurm holds because it could not start it."""
    job = view.waiting
    if job is None or "launch" not in job.reason.lower() or "held" not in job.reason.lower():
        return None
    same = view.last is not None and view.last.job_id == job.job_id
    times = job.restarts - (view.last.restart + 1 if view.last and same else 0)
    if times >= _MOST_LAUNCHES:
        return _keep(f"Slurm could not start job {job.job_id} {times} times: scontrol release {job.job_id}", "failed")
    return Decision(action=Action.UNHOLD, job_id=job.job_id, reason="Slurm could not start it on a node")


def _requeued(view: RunObservation) -> Decision | None:
    """A job that Slurm makes wait because it was requeued."""
    job = view.waiting
    # Without a restart, whoever submitted it wanted it to begin later.
    if job is None or job.reason != "BeginTime" or not job.restarts:
        return None
    if not _SOON_SECONDS < (job.eligible or 0.0) - view.now < _LATER_SECONDS:
        return None
    return _delayed(view, view.failures - 2) or Decision(
        action=Action.RELEASE, job_id=job.job_id, reason="it was requeued and waits for nothing else"
    )


def _delayed(view: RunObservation, doublings: int) -> Decision | None:
    """Nothing, for a while that gets longer with each failure."""
    since = max(view.last.ended or 0.0 if view.last else 0.0, view.handed_over_at or 0.0)
    rest = since + _FIRST_DELAY_SECONDS * 2.0**doublings - view.now if doublings >= 0 else 0.0
    return _keep(f"it failed again and again: another try in {rest:.0f} s") if rest > 0 else None


def _waits(view: RunObservation) -> Decision | None:
    """A job that waits for its turn."""
    job = view.waiting
    if job is None:
        return None
    if missed := set(view.excluded) - set(view.affordable):
        reason = f"there are too few nodes without {', '.join(sorted(missed))}"
        return Decision(action=Action.ADMIT, job_id=job.job_id, reason=reason)
    return _keep(f"job {job.job_id} waits ({job.reason})")


def _ends(view: RunObservation) -> Decision | None:
    """A job that is ending. One of a dead node is for minutes, one with a process in the kernel for ever."""
    alive = view.alive_jobs
    if not alive or any(job.state is not JobState.ENDING for job in alive):
        return None
    since = (view.last.ended if view.last else None) or (view.now - view.silent_seconds)
    return _keep(f"job {alive[-1].job_id} is ending") if view.now - since < _ENDING_SECONDS else None


def _starts(view: RunObservation) -> Decision | None:
    """A job that has nodes, and whose agents have not claimed an attempt yet."""
    job = view.holders[-1] if view.holders else None
    if job is None or view.is_last(job):
        return None
    waited = view.now - (job.started or view.now)
    # What squeue says may be older than what the ledger does.
    if waited < _CLAIM_SECONDS or (view.open and view.silent_seconds < STALE_SECONDS):
        return _keep(f"job {job.job_id} starts")
    return _relaunch(view, job, f"its agents have not begun in {waited:.0f} s")


def _leaves(view: RunObservation) -> Decision | None:
    """A job whose attempt has ended: its agents see to the next one."""
    job, last = view.holders[-1] if view.holders else None, view.last
    if job is None or last is None or last.ended is None:
        return None
    quiet = view.now - max(last.ended, view.handed_over_at or 0.0)
    agents_work = view.silent_seconds < STALE_SECONDS and quiet < _AGENTS_SECONDS
    if quiet < BUSY_SECONDS or agents_work:
        return _keep(f"job {job.job_id} is ending")
    if view.over:
        return _cancel(job, "the run has ended, and nobody ended its job")
    return _relaunch(view, job, "the attempt ended, and nobody saw to the next one")


def _runs(view: RunObservation) -> Decision | None:
    """A job in whose nodes somebody works, or nobody any more."""
    if not view.holders:
        return None
    job = view.holders[-1]
    if view.silent_seconds < STALE_SECONDS:
        return _keep(f"job {job.job_id} runs")
    return _relaunch(view, job, f"no sign of life of its agents for {view.silent_seconds:.0f} s")


def _given_up(view: RunObservation) -> Decision | None:
    last = view.last
    if last is None or not view.over:
        return None
    if last.cause == Cause.COMPLETED:
        return _keep("complete", "completed")
    return _keep("cancelled") if last.cause == Cause.CANCELLED else _keep(f"given up: {last.cause}", "failed")


def _just_ended(view: RunObservation) -> Decision | None:
    """On shared storage the agents' last words may be seen late."""
    return _keep("its job has just ended") if view.open and view.silent_seconds < STALE_SECONDS else None


def _cancelled(view: RunObservation) -> Decision | None:
    if view.dropped:
        return _keep("its job was cancelled with scancel")
    if view.fate is not JobState.CANCELLED or view.half_done:
        return None
    return Decision(action=Action.RECORD, reason="its job was cancelled with scancel")


def _vanished(view: RunObservation) -> Decision | None:
    """A job that is gone, and never began: nobody can say whether it was cancelled while it waited."""
    if view.fate.alive and view.fate is not JobState.ENDING:
        return _keep("squeue does not tell of its job, and Slurm's accounting does")
    unknown = view.fate is JobState.UNKNOWN and (view.last is None or view.handed_over_at is not None)
    failed = view.last is None and view.fate not in {JobState.UNKNOWN, JobState.NODE_FAIL}
    if not unknown and not failed:
        return None
    fate = "" if unknown else f" ({view.fate.lower()})"
    return _keep(f"its job is gone{fate} and never began: type `sbatch submit.sbatch` in its directory to go on")


def _never_begins(view: RunObservation) -> Decision | None:
    # Slurm itself requeues a job whose node fails.
    times = max([view.launches, *(job.restarts for job in view.jobs if view.last is None)])
    return (
        _keep(f"given up: its job ended {times} times before it began", "failed") if times >= _MOST_LAUNCHES else None
    )


def _ended(view: RunObservation) -> Decision:
    """A job that ended, or that Slurm lost, without having seen to the next one."""
    if delayed := _delayed(view, max(view.failures - 2, view.launches - 1)):
        return delayed
    job = view.jobs[-1] if view.jobs else None
    if view.fate is JobState.NODE_FAIL and job and job.state is JobState.NODE_FAIL:
        return Decision(action=Action.REQUEUE, job_id=job.job_id, cause=_cause(view), reason="a node failed")
    return _relaunch(view, None, f"its job is gone ({view.fate.lower()})")


def _relaunch(view: RunObservation, job: SlurmJob | None, reason: str) -> Decision:
    # Another start than the last attempt's says nothing of that one's end.
    cause = _cause(view) if job is None or view.is_last(job) else None
    return Decision(action=Action.RELAUNCH, reason=reason, job_id=job.job_id if job else None, cause=cause)


def _cause(view: RunObservation) -> Cause | None:
    """Of an attempt whose end nobody has written down."""
    return _BY_ITSELF.get(view.fate, Cause.LOST) if view.open else None


_RULES: tuple[Callable[[RunObservation], Decision | None], ...] = (
    _over, _busy, _strays, _unclear, _held, _requeued, _waits, _ends, _starts, _leaves, _runs,
    # From here on there is no job.
    _given_up, _just_ended, _cancelled, _vanished, _never_begins, _ended,
)  # fmt: skip
