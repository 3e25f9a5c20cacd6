"""How an attempt ended: the causes, and what each means for the run. Pure; runs everywhere."""

from dataclasses import dataclass
from enum import StrEnum

from hpc.slurm import JobState

# What the exit code of a rank says, beside 0 (done, or stopped and saved) and 1 (it failed).
EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_NO_SPACE = 2, 3, 4


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"
    NODE_FAILURE = "node_failure"
    BAD_NODE = "bad_node"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    BAD_INPUT = "bad_input"
    NO_SPACE = "no_space"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the head node's agent saw when torchrun had ended."""

    finished: bool
    """The work is complete: `final/` exists, or the user's script ended well without having been told to stop."""
    cancelled: bool
    """`cancel` has been called."""
    signal: str | None
    """The first signal that asked to stop."""
    job_state: JobState
    """Slurm's word for the job now."""
    preempted: bool
    """Slurm says that a preemption has begun."""
    failures: int
    """Crashes in a row, this one included, since an attempt made a step that none before it had made."""


# Slurm's word for a job that it has ended itself, and what that means.
_CAUSE_OF_STATE = {
    JobState.CANCELLED: Cause.CANCELLED,
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.PREEMPTED: Cause.PREEMPTED,
    JobState.NODE_FAIL: Cause.NODE_FAILURE,
    JobState.PENDING: Cause.REQUEUED,
}


def cause_of(ending: Ending) -> Cause:
    """Name the cause. What the run itself knows comes first, then what Slurm says, then the signal."""
    signs = (
        (ending.finished, Cause.COMPLETED),
        (ending.cancelled, Cause.CANCELLED),
        (ending.preempted, Cause.PREEMPTED),
        (ending.job_state in _CAUSE_OF_STATE, _CAUSE_OF_STATE.get(ending.job_state, Cause.LOST)),
        (ending.signal == "SIGUSR2", Cause.TIME_LIMIT),
        (ending.signal is not None, Cause.REQUEUED),
    )
    return next((cause for seen, cause in signs if seen), Cause.CRASHED)


# The causes after which there is no other attempt; a crash is worth one more, but not without end.
ENDS = frozenset({Cause.COMPLETED, Cause.CANCELLED})
MOST_FAILURES = 2


def goes_on(cause: Cause, failures: int) -> bool:
    """Whether the run needs another attempt, after so many crashes in a row without a new step."""
    return failures < MOST_FAILURES if cause is Cause.CRASHED else cause not in ENDS


def must_requeue(cause: Cause, ending: Ending) -> bool:
    """Whether the agent has to ask for the requeue, because Slurm does not do it by itself.

    What someone requeued waits already, and what lost a node Slurm requeues. A job that still runs, or that only
    ran out of time, it would simply end; so it does with one that it preempts by cancelling (PreemptMode=CANCEL).
    """
    asks = {JobState.RUNNING, JobState.TIMEOUT, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        asks |= {JobState.CANCELLED, JobState.PREEMPTED}
    return goes_on(cause, ending.failures) and ending.job_state in asks
