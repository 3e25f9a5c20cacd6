"""How an attempt ended or was interrupted: the causes, and what each means for the run. Pure; runs everywhere."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

# What the exit code of a rank says, beside 0 (done, or stopped and saved) and 1 (it failed).
EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_NO_SPACE, EXIT_DIVERGED = 2, 3, 4, 5


class Cause(StrEnum):
    """Why an attempt ended, or was interrupted."""

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
    DIVERGED = "diverged"
    CANCELLED = "cancelled"
    LOST = "lost"


class JobState(StrEnum):
    """Slurm's words for a job, as far as they matter to a run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    ENDING = "ENDING"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"

    @property
    def alive(self) -> bool:
        """Slurm still holds the job: it runs, ends, or waits to run."""
        return self in {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.ENDING}


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
    failure: Cause = Cause.CRASHED
    """What went wrong if nobody ended the attempt from outside: `cause_of_exit` of the first rank to fail, a hang, a
    lost node."""
    failures: int = 0
    """Failures in a row, this ending included (`hpc.core.attempts.failures_in_a_row`)."""


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
    return next((cause for seen, cause in signs if seen), ending.failure)


_CAUSE_OF_EXIT = {
    EXIT_BAD_INPUT: Cause.BAD_INPUT,
    EXIT_BAD_NODE: Cause.BAD_NODE,
    EXIT_NO_SPACE: Cause.NO_SPACE,
    EXIT_DIVERGED: Cause.DIVERGED,
}
# As Python, torch and the kernel say it; torch's allocator for CPUs writes "can't allocate memory".
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|[Cc]an(?:'|no)t allocate memory")
_NO_SPACE = re.compile(r"No space left on device|ENOSPC|Disk quota exceeded")
# What gloo and NCCL say in ranks whose peer has died. On a busy machine they may be written down before it.
_PEER = re.compile(
    r"by peer|remote (?:worker|process)|ncclRemoteError|NCCL communicator was aborted|connectFullMesh|Broken pipe"
)
# So torch calls the end of a loader worker, in the rank that waits for it.
_KILLED_WORKER = "killed by signal: Killed"


def is_consequence(detail: str) -> bool:
    """Whether the last words of a rank tell of another one's death."""
    return _PEER.search(detail) is not None


def cause_of_exit(exit_code: int, signal: str | None, out_of_memory: bool, detail: str, *, ours: bool = True) -> Cause:
    """Why a rank ended badly.

    Args:
        exit_code: its exit code; not looked at if a signal killed it.
        signal: that signal's name, or None.
        out_of_memory: whether the kernel has meanwhile killed a process of the job for want of memory.
        detail: the last line of its log.
        ours: whether it ran our trainer; a user's script may mean anything by its exit codes.
    """
    speaks = ours and signal is None and exit_code in _CAUSE_OF_EXIT
    killed = signal == "SIGKILL" or _KILLED_WORKER in detail
    signs = (
        (speaks, _CAUSE_OF_EXIT.get(exit_code, Cause.CRASHED)),
        (out_of_memory and killed, Cause.OUT_OF_MEMORY),
        (_NO_MEMORY.search(detail) is not None, Cause.OUT_OF_MEMORY),
        (_NO_SPACE.search(detail) is not None, Cause.NO_SPACE),
    )
    return next((cause for seen, cause in signs if seen), Cause.CRASHED)


# The causes after which the run is over without having failed.
FINAL_CAUSES = frozenset({Cause.COMPLETED, Cause.CANCELLED})
MOST_FAILURES = 2
# Kinds of failure, and how many of a kind in a row, without a step that none before had made, end the run as failed.
# What stands in none of them comes from outside and is free: preemptions, requeues.
_KINDS = (
    # No other attempt can mend it, only a person: one that diverged would do so again, at the same step.
    (frozenset({Cause.BAD_INPUT, Cause.NO_SPACE, Cause.DIVERGED}), 1),
    (frozenset({Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.LOST, Cause.TIME_LIMIT}), MOST_FAILURES),
    # Each is excluded and another one tried; where so many are unfit, it is not the nodes.
    (frozenset({Cause.BAD_NODE}), 5),
    # Nodes die; but what costs one node after the other, and no step was made, is the run's own doing.
    (frozenset({Cause.NODE_FAILURE}), 5),
)


_RAN_WELL = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


def _kind(cause: str) -> tuple[frozenset[Cause], float]:
    return next((kind for kind in _KINDS if cause in kind[0]), (frozenset(), inf))


def count_failures(interruptions: Iterable[tuple[str, int | None]]) -> int:
    """Failures of the last one's kind, itself included, since the run last made a step that none before had made.

    A time limit counts only if its attempt got no further, as when staging takes longer than the limit.

    Args:
        interruptions: what interrupted or ended the attempts, in order of time, each with the last step that had been
            done by then. None: a user's script, whose steps nobody knows; what was ended from outside ran well by then.
    """
    best, row = 0, list[str]()
    for cause, step in interruptions:
        advanced = (step or 0) > best
        if advanced:
            best, row = step or 0, []
        if step is None and cause in _RAN_WELL:
            row = []
            continue
        if not (advanced and cause == Cause.TIME_LIMIT):
            row.append(cause)
    return sum(cause in _kind(row[-1])[0] for cause in row)


def may_restart(cause: str, failures: int) -> bool:
    """Whether the run goes on after an interruption that is the last of so many failures in a row."""
    return cause not in FINAL_CAUSES and failures < _kind(cause)[1]


def must_requeue(cause: Cause, ending: Ending) -> bool:
    """Whether the agent has to ask for the requeue, because Slurm does not do it by itself.

    What someone requeued waits already, and what lost a node Slurm requeues. A job that still runs, or that only
    ran out of time, it would simply end; so it does with one that it preempts by cancelling (PreemptMode=CANCEL).
    """
    asks = {JobState.RUNNING, JobState.TIMEOUT, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        asks |= {JobState.CANCELLED, JobState.PREEMPTED}
    return may_restart(cause, ending.failures) and ending.job_state in asks
