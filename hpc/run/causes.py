"""The reasons why attempts are interrupted or end. Pure; runs everywhere."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hpc.base.errors import EXIT_BAD_INPUT, EXIT_BAD_NODE, EXIT_DIVERGED, EXIT_NO_SPACE


class Cause(StrEnum):
    """The reason why an attempt was interrupted or ended."""

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
    """The states of a Slurm job that matter to a run."""

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
        """Whether the job is in Slurm's queue: pending, running, suspended or ending."""
        return self in {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.ENDING}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The facts from which an agent concludes the cause of an attempt's end."""

    finished: bool
    """Whether the work is complete: `final/` has a result, or a script's ranks exited with 0 without a stop signal."""
    cancelled: bool
    """Whether the user called `hpc cancel`."""
    signal: str | None
    """The name of the first signal to stop, such as SIGTERM; None if no signal came."""
    job_state: JobState
    preempted: bool
    """Whether Slurm has begun to preempt the job."""
    failure: Cause = Cause.CRASHED
    """The cause if nothing outside ended the attempt: `cause_of_exit` of the first rank to fail, a hang, or a lost
    node."""


# The cause of an attempt's end if Slurm itself has put the job into this state.
_CAUSE_OF_STATE = {
    JobState.CANCELLED: Cause.CANCELLED,
    JobState.TIMEOUT: Cause.TIME_LIMIT,
    JobState.PREEMPTED: Cause.PREEMPTED,
    JobState.NODE_FAIL: Cause.NODE_FAILURE,
    JobState.PENDING: Cause.REQUEUED,
}


def cause_of(ending: Ending) -> Cause:
    """Return the cause of an attempt's end. The run's own facts come first, then Slurm's state, then the signal.

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


EXIT_CODES = {
    EXIT_BAD_INPUT: Cause.BAD_INPUT,
    EXIT_BAD_NODE: Cause.BAD_NODE,
    EXIT_NO_SPACE: Cause.NO_SPACE,
    EXIT_DIVERGED: Cause.DIVERGED,
}
"""The causes by the exit codes of our own programs."""
# Messages of Python, torch and the kernel about lack of memory. torch's CPU allocator writes "can't allocate memory".
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|[Cc]an(?:'|no)t allocate memory")
# NCCL reports that an InfiniBand function "cannot allocate memory" if a process may lock too little (ulimit -l).
_INFINIBAND = "ibv_"
_NO_SPACE = re.compile(r"No space left on device|ENOSPC|Disk quota exceeded")
# Messages of gloo and NCCL in ranks whose peer has died. On a busy machine they may be logged before the peer's error.
_PEER_DIED = re.compile(
    r"by peer|remote (?:worker|process|peer)|ncclRemoteError|NCCL communicator was aborted|connectFullMesh|Broken pipe"
    "|[Ww]atchdog caught collective operation timeout"
)
# Messages of torch in ranks whose peer does not answer, for whatever reason.
_NO_ANSWER = re.compile(
    r"[Tt]imed out|[Tt]imeout|Dist(?:Backend|Network|Store)Error|[Cc]onnection (?:refused|was likely closed)"
)
# Messages of CUDA (cudaGetErrorString), NCCL and the driver about a GPU that is dead or misconfigured. A launch failure
# may also be the program's fault: it then recurs at the same step on another node, which ends the run.
_DEAD_DEVICE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|busy or unavailable|launch failure|hardware (?:stack )?error|GPU is lost"
    r"|fallen off the bus|ncclInternalError|internal error - please report|\bXid\b"
)
# Torch's message in a rank whose loader worker was killed.
_KILLED_WORKER = "killed by signal: Killed"


def is_consequence(detail: str) -> bool:
    """Return whether a rank's last message reports the death of another rank."""
    return _PEER_DIED.search(detail) is not None


def may_have_waited(detail: str) -> bool:
    """Return whether a rank's last message may report that another rank does not answer."""
    return is_consequence(detail) or _NO_ANSWER.search(detail) is not None


def is_device_failure(detail: str) -> bool:
    """Return whether a rank's message says that its device or the device's driver has failed."""
    return _DEAD_DEVICE.search(detail) is not None and not is_consequence(detail)


def cause_of_exit(
    exit_code: int, signal: str | None, out_of_memory: bool, detail: str, exit_codes: Mapping[int, Cause]
) -> Cause:
    """Return the cause of a rank's failure, from its exit code or the signal that killed it, and its message.

    `signal` is the signal's name; None if the rank exited. `out_of_memory` says whether the kernel killed a process of
    the node for lack of memory while the rank ran. `detail` is the rank's exception, or else its last log line.
    `exit_codes` has the causes of the exit codes of the rank's program.
    """
    if signal is None and exit_code in exit_codes:
        return exit_codes[exit_code]
    killed = signal == "SIGKILL" or _KILLED_WORKER in detail
    if (out_of_memory and killed) or (_NO_MEMORY.search(detail) and _INFINIBAND not in detail):
        return Cause.OUT_OF_MEMORY
    if is_device_failure(detail):
        return Cause.BAD_NODE
    return Cause.NO_SPACE if _NO_SPACE.search(detail) else Cause.CRASHED
