"""Why an attempt was interrupted or ended, and whether the run restarts after it. Pure; runs everywhere."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

# Exit codes of a rank beside 0 (done, or stopped and saved) and 1 (any other error).
EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_NO_SPACE, EXIT_DIVERGED = 2, 3, 4, 5


class Cause(StrEnum):
    """Why an attempt was interrupted or ended."""

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
    """Slurm's states of a job, as far as they matter to a run."""

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
        """Whether Slurm still holds the job."""
        return self in {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.ENDING}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the head node's agent knows when torchrun has ended."""

    finished: bool
    """The work is complete: `final/` exists, or the user's script exited with 0 without a signal to stop."""
    cancelled: bool
    """The user called `hpc cancel`."""
    signal: str | None
    """The first signal to stop."""
    job_state: JobState
    preempted: bool
    """Slurm has begun to preempt the job."""
    failure: Cause = Cause.CRASHED
    """The cause if nothing outside ended the attempt: the `cause_of_exit` of the first rank to fail, a hang, a lost
    node."""


# What it means that Slurm has put a job into this state by itself.
_CAUSE_OF_STATE = {
    JobState.CANCELLED: Cause.CANCELLED,
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.PREEMPTED: Cause.PREEMPTED,
    JobState.NODE_FAIL: Cause.NODE_FAILURE,
    JobState.PENDING: Cause.REQUEUED,
}


def cause_of(ending: Ending) -> Cause:
    """The cause of an attempt's end: by what the run itself knows, then by Slurm's state, then by the signal.

    `sbatch --signal` sends SIGUSR2 before the time limit; a preemption or requeue sends SIGTERM.
    """
    rules = (
        (ending.finished, Cause.COMPLETED),
        (ending.cancelled, Cause.CANCELLED),
        (ending.preempted, Cause.PREEMPTED),
        (ending.job_state in _CAUSE_OF_STATE, _CAUSE_OF_STATE.get(ending.job_state, Cause.LOST)),
        (ending.signal == "SIGUSR2", Cause.TIME_LIMIT),
        (ending.signal is not None, Cause.REQUEUED),
    )
    return next((cause for holds, cause in rules if holds), ending.failure)


_CAUSE_OF_EXIT = {
    EXIT_BAD_INPUT: Cause.BAD_INPUT,
    EXIT_BAD_NODE: Cause.BAD_NODE,
    EXIT_NO_SPACE: Cause.NO_SPACE,
    EXIT_DIVERGED: Cause.DIVERGED,
}
# Messages of Python, torch and the kernel; torch's CPU allocator writes "can't allocate memory".
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|[Cc]an(?:'|no)t allocate memory")
_NO_SPACE = re.compile(r"No space left on device|ENOSPC|Disk quota exceeded")
# Messages of gloo and NCCL in ranks whose peer has died. On a busy machine they may be logged before the peer's error.
_PEER_DIED = re.compile(
    r"by peer|remote (?:worker|process)|ncclRemoteError|NCCL communicator was aborted|connectFullMesh|Broken pipe"
)
# Torch's message in the rank whose loader worker was killed.
_KILLED_WORKER = "killed by signal: Killed"


def is_consequence(detail: str) -> bool:
    """Whether a rank's last message reports the death of another rank."""
    return _PEER_DIED.search(detail) is not None


def cause_of_exit(exit_code: int, signal: str | None, out_of_memory: bool, detail: str, *, ours: bool = True) -> Cause:
    """Why a rank failed, from its exit code or the name of the signal that killed it, and the last line of its log.

    `out_of_memory`: the kernel has meanwhile killed a process of the node for lack of memory. `ours`: it ran our
    trainer; the exit codes of a user's script may mean anything.
    """
    if ours and signal is None and exit_code in _CAUSE_OF_EXIT:
        return _CAUSE_OF_EXIT[exit_code]
    killed = signal == "SIGKILL" or _KILLED_WORKER in detail
    if (out_of_memory and killed) or _NO_MEMORY.search(detail):
        return Cause.OUT_OF_MEMORY
    return Cause.NO_SPACE if _NO_SPACE.search(detail) else Cause.CRASHED


# The causes after which a run is over without having failed.
FINAL_CAUSES = frozenset({Cause.COMPLETED, Cause.CANCELLED})
# Budgets: after how many failures of a kind in a row, without a new step in between, a run has failed. Causes in no
# group come from outside the run and are free: preemptions, requeues.
_BUDGETS = (
    # Only a person can repair these; after a divergence, the next attempt would diverge at the same step.
    (frozenset({Cause.BAD_INPUT, Cause.NO_SPACE, Cause.DIVERGED}), 1),
    (frozenset({Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HANG, Cause.LOST, Cause.TIME_LIMIT}), 2),
    # Each bad node is excluded from the next attempt; after five, the run itself is the likely cause.
    (frozenset({Cause.BAD_NODE}), 5),
    (frozenset({Cause.NODE_FAILURE}), 5),
)
_NOT_ITS_FAULT = frozenset({Cause.PREEMPTED, Cause.REQUEUED, Cause.TIME_LIMIT})


def _budget(cause: str) -> tuple[frozenset[Cause], float]:
    return next((group for group in _BUDGETS if cause in group[0]), (frozenset(), inf))


def count_failures(interruptions: Iterable[tuple[str, int | None]]) -> int:
    """Failures of the last one's kind, itself included, since the run last reached a new highest step.

    Each interruption or end, in order, has a cause and the last step done by then. The step is None for a user's
    script. A script's attempt that ended from outside (preemption, requeue, time limit) counts as progress. A
    training's time limit counts only if its attempt reached no new step, for example when staging takes longer than
    the limit.
    """
    best, row = 0, list[str]()
    for cause, step in interruptions:
        advanced = (step or 0) > best
        if advanced:
            best, row = step or 0, []
        if step is None and cause in _NOT_ITS_FAULT:
            row = []
        elif not (advanced and cause == Cause.TIME_LIMIT):
            row.append(cause)
    return sum(cause in _budget(row[-1])[0] for cause in row)


def may_restart(cause: str, failures: int) -> bool:
    """Whether the run restarts after an interruption that is the last of `failures` in a row."""
    return cause not in FINAL_CAUSES and failures < _budget(cause)[1]


def must_requeue(cause: Cause, job_state: JobState, failures: int) -> bool:
    """Whether the agent must ask for the requeue after the last of `failures` in a row: Slurm does not do it by itself.

    Slurm requeues a job that lost a node; somebody's requeue is already pending. But it ends a job that still runs or
    has reached its time limit, and with PreemptMode=CANCEL one that it preempts.
    """
    not_requeued = {JobState.RUNNING, JobState.TIMEOUT, JobState.UNKNOWN}
    if cause is Cause.PREEMPTED:
        not_requeued |= {JobState.CANCELLED, JobState.PREEMPTED}
    return may_restart(cause, failures) and job_state in not_requeued
