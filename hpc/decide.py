"""What the supervisor does about a run: pure, from what is known of the run to one action and its reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hpc.attempts import Attempt, failures_in_a_row
from hpc.job import Job, JobState
from hpc.outcome import Cause, goes_on

# The head node's agent gives a sign of life every few seconds; storage that fails over is silent for a minute.
STALE_SECONDS = 60.0
# What an agent, or another supervisor, has begun is done by then: three calls of Slurm's clients, with their timeouts.
BUSY_SECONDS = 100.0
# A job that runs, and whose agent has not claimed an attempt: its file systems are not there, or its network.
_CLAIM_SECONDS = 600.0
# Launches that fail one after the other are not the nodes' fault.
_MOST_LAUNCHES = 5
# Less than this is not worth a call, and clocks differ.
_SOON_SECONDS = 30.0
_FIRST_DELAY_SECONDS, _MOST_DELAY_SECONDS = 30.0, 3600.0
_BY_ITSELF = {JobState.TIMEOUT: Cause.TIME_LIMIT, JobState.NODE_FAIL: Cause.NODE_FAILURE}


class Action(StrEnum):
    """What the supervisor can do."""

    KEEP = "keep"
    """Nothing."""
    RELEASE = "release"
    """End the wait of a job that was requeued."""
    UNHOLD = "unhold"
    """Release a job that Slurm holds because it could not be started."""
    ADMIT = "admit"
    """Let a job that waits have nodes again that failed the run: without them there are too few."""
    REQUEUE = "requeue"
    """Put a job that has ended back into the queue."""
    RELAUNCH = "relaunch"
    """Write down the end of the attempt if nobody has, submit a new job for the run, and end the old one."""
    CANCEL = "cancel"
    """End a job that does nothing any more."""
    RECORD = "record"
    """Write down that somebody cancelled the attempt's job, and that no agent could say it."""


STARTS = frozenset({Action.RELEASE, Action.UNHOLD, Action.REQUEUE, Action.RELAUNCH})
"""Those after which a run stages and trains."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of a run. Times are seconds since the epoch."""

    finished: bool = False
    """It is complete."""
    cancelled: bool = False
    """`hpc cancel` has been called."""
    attempts: Sequence[Attempt] = ()
    jobs: Sequence[Job] = ()
    """The run's that Slurm knows, also those that have ended, the oldest first."""
    fates: Mapping[str, JobState] = field(default_factory=dict)
    """How jobs ended that squeue has forgotten, as far as Slurm's accounting knows."""
    alive_at: float | None = None
    """The last sign of life of the head node's agent."""
    handed_over_at: float | None = None
    """When the last attempt's next job was requeued or submitted."""
    excluded: Sequence[str] = ()
    """Nodes that the last job keeps away from, because they failed the run."""
    affordable: Sequence[str] = ()
    """Those that it could keep away from now."""
    busy_until: float = 0.0
    """Another supervisor is at it, until then at the latest."""
    now: float

    @property
    def last(self) -> Attempt | None:
        """The last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def failures(self) -> int:
        """In a row, without a step in between."""
        return failures_in_a_row(self.attempts)

    @property
    def alive_jobs(self) -> list[Job]:
        """Those that wait, run, or are ending."""
        return [job for job in self.jobs if job.state.alive]

    @property
    def running(self) -> Job | None:
        """The job that has nodes."""
        return next((job for job in self.jobs if job.state is JobState.RUNNING), None)

    @property
    def waiting(self) -> Job | None:
        """The job that waits for nodes, if none has some."""
        waiting = next((job for job in self.jobs if job.state is JobState.PENDING), None)
        return None if self.running else waiting

    @property
    def fate(self) -> JobState:
        """How the last job ended."""
        known = [*self.fates.values(), *(job.state for job in self.jobs[-1:])]
        return known[-1] if known else JobState.UNKNOWN

    def silent_seconds(self, since: float) -> float:
        """How long the agents have given no sign of life, at the most since some time."""
        return self.now - max(since, self.alive_at or 0.0)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One action, and why."""

    action: Action = Action.KEEP
    reason: str
    job_id: str | None = None
    """The job that it is done to."""
    cause: Cause | None = None
    """Of the end of the attempt, where nobody has written it down."""


def decide(view: View) -> Decision:
    """What to do about a run now."""
    return next(decision for rule in _RULES if (decision := rule(view)))


def _keep(reason: str) -> Decision:
    return Decision(reason=reason)


def _over(view: View) -> Decision | None:
    if view.finished:
        return _keep("complete")
    if not view.cancelled:
        return None
    alive = next((job for job in view.alive_jobs if job.state is not JobState.ENDING), None)
    if alive is None:
        return _keep("cancelled")
    return Decision(action=Action.CANCEL, job_id=alive.job_id, reason="the run was cancelled")


def _busy(view: View) -> Decision | None:
    return _keep("another supervisor is at it") if view.now < view.busy_until else None


def _strays(view: View) -> Decision | None:
    """A job whose attempt has ended, while the next job of the run is there."""
    ended = {(attempt.job_id, attempt.restart) for attempt in view.attempts if attempt.ended is not None}
    alive = [job for job in view.alive_jobs if job.state is not JobState.ENDING]
    done = [job for job in alive if job.state is JobState.RUNNING and (job.job_id, job.restarts) in ended]
    if not done or len(alive) < 2:
        return None
    return Decision(action=Action.CANCEL, job_id=done[0].job_id, reason="another job has taken its place")


def _unknown(view: View) -> Decision | None:
    odd = next((job for job in view.jobs if job.state is JobState.UNKNOWN), None)
    return _keep(f"job {odd.job_id} is in a state that this version does not know") if odd else None


def _held(view: View) -> Decision | None:
    """A job that Slurm holds because it could not start it."""
    job = view.waiting
    if job is None or "launch" not in job.reason.lower() or "held" not in job.reason.lower():
        return None
    if job.restarts >= _MOST_LAUNCHES:
        return _keep(f"Slurm could not start job {job.job_id} {job.restarts} times: scontrol release {job.job_id}")
    return Decision(action=Action.UNHOLD, job_id=job.job_id, reason="Slurm could not start it on a node")


def _requeued(view: View) -> Decision | None:
    """A job that Slurm makes wait because it was requeued."""
    job = view.waiting
    # Without a restart, whoever submitted it wanted it to begin later.
    if job is None or job.reason != "BeginTime" or not job.restarts:
        return None
    if (job.eligible or 0.0) <= view.now + _SOON_SECONDS:
        return None
    rest = _delay(view)
    if rest > 0:
        return _keep(f"it failed {view.failures} times in a row: another try in {rest:.0f} s")
    return Decision(action=Action.RELEASE, job_id=job.job_id, reason="it was requeued and waits for nothing else")


def _waits(view: View) -> Decision | None:
    """A job that waits for its turn."""
    job = view.waiting
    if job is None:
        return None
    if missed := set(view.excluded) - set(view.affordable):
        reason = f"there are too few nodes without {', '.join(sorted(missed))}"
        return Decision(action=Action.ADMIT, job_id=job.job_id, reason=reason)
    return _keep(f"job {job.job_id} waits ({job.reason})")


def _delay(view: View) -> float:
    """Seconds that are left until the next try: longer after each failure, the first one at once."""
    if view.last is None or view.last.ended is None or view.failures < 2:
        return 0.0
    delay = min(_FIRST_DELAY_SECONDS * 2.0 ** (view.failures - 2), _MOST_DELAY_SECONDS)
    return max(0.0, view.last.ended + delay - view.now)


def _ends(view: View) -> Decision | None:
    alive = view.alive_jobs
    return _keep(f"job {alive[0].job_id} is ending") if alive and alive[0].state is JobState.ENDING else None


def _starts(view: View) -> Decision | None:
    """A job that has nodes, and whose agents have not claimed an attempt yet."""
    job, last = view.running, view.last
    if job is None or (last and (last.job_id, last.restart) == (job.job_id, job.restarts)):
        return None
    waited = view.now - (job.started or view.now)
    if waited < _CLAIM_SECONDS:
        return _keep(f"job {job.job_id} starts")
    return _relaunch(view, job, f"its agents have not begun in {waited:.0f} s")


def _leaves(view: View) -> Decision | None:
    """A job whose attempt has ended: its agents see to the next one."""
    job, last = view.running, view.last
    if job is None or last is None or last.ended is None:
        return None
    if view.now - max(last.ended, view.handed_over_at or 0.0) < BUSY_SECONDS:
        return _keep(f"job {job.job_id} is ending")
    if not goes_on(last.cause or Cause.LOST, view.failures):
        return Decision(action=Action.CANCEL, job_id=job.job_id, reason="the run has ended, and nobody ended its job")
    return _relaunch(view, job, "the attempt ended, and nobody saw to the next one")


def _runs(view: View) -> Decision | None:
    """A job in whose nodes somebody works, or nobody any more."""
    if view.running is None or view.last is None:
        return None
    silent = view.silent_seconds(view.last.started)
    if silent < STALE_SECONDS:
        return _keep(f"job {view.running.job_id} runs")
    return _relaunch(view, view.running, f"no sign of life of its agents for {silent:.0f} s")


def _given_up(view: View) -> Decision | None:
    last = view.last
    if last is None or last.ended is None or goes_on(last.cause or Cause.LOST, view.failures):
        return None
    return _keep("cancelled" if last.cause == Cause.CANCELLED else f"given up: {last.cause}")


def _just_ended(view: View) -> Decision | None:
    """On shared storage the agents' last words may be seen late."""
    open_ended = view.last is not None and view.last.ended is None
    if not open_ended or view.silent_seconds(view.last.started if view.last else 0.0) >= STALE_SECONDS:
        return None
    return _keep("its job has just ended")


def _cancelled(view: View) -> Decision | None:
    if view.fate is not JobState.CANCELLED:
        return None
    told = view.last is None or view.last.ended is not None
    return Decision(action=Action.KEEP if told else Action.RECORD, reason="its job was cancelled with scancel")


def _node_failed(view: View) -> Decision | None:
    """A job that a node failure ended, and that Slurm does not requeue by itself."""
    job = view.jobs[-1] if view.jobs else None
    if job is None or view.fate is not JobState.NODE_FAIL or (view.last is None and job.restarts >= _MOST_LAUNCHES):
        return None
    return Decision(action=Action.REQUEUE, job_id=job.job_id, cause=_cause(view), reason="a node failed")


def _vanished(view: View) -> Decision | None:
    """A job that is gone, and never began. One that was cancelled while it waited leaves no word."""
    if view.last is not None and not (view.fate is JobState.UNKNOWN and view.handed_over_at):
        return None
    fate = "" if view.fate is JobState.UNKNOWN else f" ({view.fate.lower()})"
    return _keep(f"its job is gone{fate} and never began: type `sbatch submit.sbatch` in its directory to go on")


def _ended(view: View) -> Decision:
    """A job that ended, or that Slurm lost, without having seen to the next one."""
    rest = _delay(view)
    if rest > 0:
        return _keep(f"it failed {view.failures} times in a row: another try in {rest:.0f} s")
    return _relaunch(view, None, f"its job is gone ({view.fate.lower()})")


def _relaunch(view: View, job: Job | None, reason: str) -> Decision:
    return Decision(action=Action.RELAUNCH, reason=reason, job_id=job.job_id if job else None, cause=_cause(view))


def _cause(view: View) -> Cause | None:
    """Of an attempt whose end nobody has written down."""
    if view.last is None or view.last.ended is not None:
        return None
    return _BY_ITSELF.get(view.fate, Cause.LOST)


_RULES: tuple[Callable[[View], Decision | None], ...] = (
    _over, _busy, _strays, _unknown, _held, _requeued, _waits, _ends, _starts, _leaves, _runs,
    # From here on there is no job.
    _given_up, _just_ended, _cancelled, _node_failed, _vanished, _ended,
)  # fmt: skip
