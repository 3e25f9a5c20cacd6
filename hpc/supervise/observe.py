"""Gathers what the supervisor knows of a run: its directory, heartbeats, and jobs. Runs on the login node."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc.base.errors import TorchrelayError
from hpc.base.files import modified
from hpc.run.causes import JobState
from hpc.run.events.attempts import Attempt, budget_of
from hpc.run.events.history import History
from hpc.run.events.kinds import Excluded, Released, Requeued, Resubmitted, Resumed, Submitted
from hpc.run.rundir import RunDir
from hpc.slurm import handover, squeue
from hpc.slurm.squeue import SlurmJob


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """A run as it was at one moment: the facts that `decide` uses. Times are seconds since the epoch."""

    run: RunDir
    history: History
    """Of a complete run, the history has no events: they are not read at every poll."""
    jobs: Sequence[SlurmJob] = ()
    """The run's jobs in squeue, including ended jobs, the oldest first."""
    without_first_node: frozenset[str] = frozenset()
    """Ids of running jobs that lost the node of their batch script, and have not claimed the last attempt."""
    last_job_state: JobState = JobState.UNKNOWN
    """State of the last job, from squeue or, if squeue does not list the job, from Slurm's accounting."""
    heartbeat_at: float | None = None
    """Time of the last heartbeat of the first node's agent; None before the first."""
    heartbeat_mtime: float | None = None
    """Modification time of the run's file `alive`, by its storage's clock; None without the file."""
    queued_jobs: int = 0
    """Number of requeues and new jobs since the last attempt and the last `hpc resume`."""
    handed_over_at: float | None = None
    """Time of the last requeue, new job or release since the last attempt and `hpc resume`; None without one."""
    handover_deadline: float = 0.0
    """Time until which the process of an unfinished handover may finish; 0 if it died."""
    excluded: Sequence[str] = ()
    """Nodes that the last job excludes: the user's --exclude, and nodes that failed the run."""
    excludable: Sequence[str] = ()
    """Nodes that the pending job could exclude now, because the partition has enough others."""
    now: float

    @property
    def last(self) -> Attempt | None:
        """The last attempt."""
        return self.history.last_attempt

    @property
    def attempt(self) -> int:
        """Number of the last attempt; 0 before the first."""
        return self.last.attempt if self.last else 0

    @property
    def end_missing(self) -> bool:
        """Whether the ledger lacks the end of the last attempt."""
        return self.last is not None and self.last.ended is None

    @property
    def over(self) -> bool:
        """Whether no attempt will follow."""
        given_up = not self.end_missing and not self.history.may_restart
        return self.history.complete or self.history.is_cancelled or given_up

    @property
    def failures(self) -> int:
        """Number of failures without progress that count toward the same limit as the last one, including the last."""
        return budget_of(self.history.attempts).failures

    @property
    def alive_jobs(self) -> list[SlurmJob]:
        """Jobs that have not ended: they are pending, running, suspended or ending."""
        return [job for job in self.jobs if job.state.alive]

    @property
    def running_jobs(self) -> list[SlurmJob]:
        """Running jobs; the job of the last attempt comes last."""
        return sorted((job for job in self.jobs if job.state is JobState.RUNNING), key=self.made_last_attempt)

    @property
    def pending_job(self) -> SlurmJob | None:
        """The newest pending job; None if the run has none, or has a running job."""
        pending = [job for job in self.jobs if job.state is JobState.PENDING]
        return pending[-1] if pending and not self.running_jobs else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last attempt's claim or the last heartbeat, whichever is later; 0 without either."""
        # Just after a claim, the heartbeat is the previous attempt's. A clock that is ahead puts a claim in the future.
        started = self.last.started if self.last and self.last.started <= self.now else None
        known = [at for at in (started, self.heartbeat_at) if at is not None]
        return self.now - max(known, default=self.now)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last heartbeat, end of an attempt, requeue, new job or release."""
        worked = self.now - self.silent_seconds if self.last else 0.0
        return self.now - max(worked, self.last.ended or 0.0 if self.last else 0.0, self.handed_over_at or 0.0)

    def made_last_attempt(self, job: SlurmJob) -> bool:
        """Return whether the last attempt is of this job since its latest start: same id and number of restarts."""
        return self.last is not None and (self.last.job_id, self.last.restart) == (job.job_id, job.restarts)


def observe(run: RunDir, jobs: Mapping[str, Sequence[SlurmJob]], storage_now: float) -> RunObservation:
    """Observe a run. Raises OSError if its directory was deleted, or cannot be read by this user.

    `jobs` comes from `jobs_by_script`. `storage_now` is the `storage_time` of the directory that holds the runs.
    """
    now, mtime = time.time(), modified(run.alive)
    listed = jobs.get(os.path.realpath(run.script), ())
    history = History(complete=True) if run.final_result.exists() else History.load(run)
    job_id = history.last_job_id
    last_resumed = max((at for at, event in enumerate(history.events) if isinstance(event, Resumed)), default=0)
    number = history.last_attempt.attempt if history.last_attempt else 0
    own = [event for event in history.events[last_resumed:] if event.attempt == number]
    queued = [event.time for event in own if isinstance(event, Requeued | Resubmitted)]
    released = [event.time for event in own if isinstance(event, Released)]
    excluded = [event.excluded for event in history.events if isinstance(event, Submitted | Resubmitted | Excluded)]
    return RunObservation(
        run=run,
        history=history,
        jobs=listed,
        last_job_state=next((job.state for job in listed if job.job_id == job_id), JobState.UNKNOWN),
        heartbeat_mtime=mtime,
        heartbeat_at=None if mtime is None else now - (storage_now - mtime),
        queued_jobs=len(queued),
        handed_over_at=max([*queued, *released], default=None),
        handover_deadline=handover.handover_deadline(history.unfinished_handover(number)),
        excluded=excluded[-1] if excluded else (),
        now=now,
    )


def with_final_states(found: list[RunObservation]) -> list[RunObservation]:
    """Add the state of each run's last job from Slurm's accounting, if squeue no longer lists the job."""
    unlisted = dict[RunDir, str]()
    for one in found:
        job_id = one.history.last_job_id
        if job_id and not one.over and all(job.job_id != job_id for job in one.jobs):
            unlisted[one.run] = job_id
    try:
        states = squeue.final_states(list(unlisted.values())) if unlisted else {}
    except TorchrelayError:
        return found  # the cluster has no accounting
    return [replace(one, last_job_state=states.get(unlisted.get(one.run, ""), one.last_job_state)) for one in found]
