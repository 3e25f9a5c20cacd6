"""What the supervisor knows of a run, and what it can do about it: pure data."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpc.core.attempts import Attempt, failures_in_a_row, may_restart_after
from hpc.core.outcome import Cause, JobState
from hpc.slurm.squeue import SlurmJob


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
    """Write down that somebody cancelled the last job: Slurm will forget it."""


STARTS = frozenset({Action.RELEASE, Action.UNHOLD, Action.REQUEUE, Action.RELAUNCH})
"""Those after which a run stages and trains."""


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """What is known of a run. Times are seconds since the epoch."""

    finished: bool = False
    """It is complete."""
    cancelled: bool = False
    """`hpc cancel` has been called."""
    dropped: bool = False
    """Its last job was cancelled with scancel."""
    attempts: Sequence[Attempt] = ()
    jobs: Sequence[SlurmJob] = ()
    """The run's that Slurm knows, also those that have ended, the oldest first."""
    fate: JobState = JobState.UNKNOWN
    """Of the job that Slurm was given last, by squeue or, if that has forgotten it, by Slurm's accounting."""
    alive_at: float | None = None
    """The last sign of life of the head node's agent."""
    launches: int = 0
    """Jobs that were queued since the last attempt."""
    handed_over_at: float | None = None
    """When the last of them was."""
    half_done: bool = False
    """Somebody has set about to submit the next job, has perhaps ended the old one, and has not got to the new one."""
    busy_until: float = 0.0
    """Another one is at it, until then at the latest."""
    excluded: Sequence[str] = ()
    """Nodes that the last job keeps away from, because they failed the run."""
    affordable: Sequence[str] = ()
    """Those that it could keep away from now."""
    now: float

    @property
    def last(self) -> Attempt | None:
        """The last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def open(self) -> bool:
        """Whether nobody has written down how the last attempt ended."""
        return self.last is not None and self.last.ended is None

    @property
    def over(self) -> bool:
        """Whether nothing will follow."""
        given_up = not self.open and not may_restart_after(self.attempts)
        return self.finished or self.cancelled or given_up

    @property
    def failures(self) -> int:
        """In a row, without a step in between."""
        return failures_in_a_row(self.attempts)

    @property
    def alive_jobs(self) -> list[SlurmJob]:
        """Those that wait, run, or are ending."""
        return [job for job in self.jobs if job.state.alive]

    @property
    def holders(self) -> list[SlurmJob]:
        """The jobs that have nodes, that of the last attempt last."""
        return sorted((job for job in self.jobs if job.state is JobState.RUNNING), key=self.is_last)

    @property
    def waiting(self) -> SlurmJob | None:
        """The job that waits for nodes, if none has some."""
        waiting = [job for job in self.jobs if job.state is JobState.PENDING]
        return waiting[-1] if waiting and not self.holders else None

    @property
    def silent_seconds(self) -> float:
        """How long the agents of the last attempt have given no sign of life."""
        begun = self.last.started if self.last else self.now
        return self.now - (begun if self.alive_at is None else self.alive_at)

    def is_last(self, job: SlurmJob) -> bool:
        """Whether a job is the one, and in the very start, that made the last attempt."""
        return self.last is not None and (self.last.job_id, self.last.restart) == (job.job_id, job.restarts)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One action, and why."""

    action: Action = Action.KEEP
    reason: str
    job_id: str | None = None
    """The job that it is done to."""
    cause: Cause | None = None
    """Of the end of the attempt, where nobody has written it down."""
    news: str | None = None
    """What its user wants to hear of: the run is completed, or has failed for good."""
