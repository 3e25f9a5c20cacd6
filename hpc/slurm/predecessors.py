"""The runs that a run waits for (`hpc submit --after`), and Slurm's dependency for its job. On login and compute nodes.

A dependency names jobs, but a run may continue in another job, or be requeued by hand after its job has ended. So each
process that submits the next job of a run redirects the jobs that wait for it (`redirect_waiting_jobs`), and a job that
starts too early waits again (jobs.claim). Slurm waits only for the end of a job (`afterany`); the run directory says
how the run has ended.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc.base.errors import TorchrelayError, UserError
from hpc.run.causes import JobState
from hpc.run.events.history import History, Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import squeue
from hpc.slurm.squeue import SlurmJob, jobs_by_script

# Slurm's reason for a job after `slurm.requeue_held`, even while its old processes still end. A job that its user holds
# has another reason.
_HELD = "job requeued in held state"
_ENDED = {"failed": "has failed", "cancelled": "was cancelled", "removed": "was removed"}


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """A run that another run waits for."""

    run: RunDir
    must_complete: bool
    """Whether the run must complete (--after-ok); if False, any end is enough."""
    outcome: Outcome | Literal["removed"] | None
    """How the run has ended; None if it goes on."""
    job_id: str | None
    """Id of the run's newest job that is alive; None if the run has no such job."""

    @property
    def is_over(self) -> bool:
        """Whether the wait for this run is over."""
        return self.outcome == "completed" or (self.outcome is not None and not self.must_complete)

    @property
    def problem(self) -> str | None:
        """Reason why no job can wait for this run, and what to type; None if it has a job, or if the wait is over."""
        name = self.run.name
        if self.is_over or (self.outcome is None and self.job_id):
            return None
        if self.outcome is None:
            return f"run {name}, which it waits for, has no job: type hpc resume {name}, or hpc cancel {name}"
        advice = "" if self.outcome == "removed" else f": type hpc resume {name}"
        return f"run {name}, which must be complete first, {_ENDED[self.outcome]}{advice}"


def predecessors_of(run: RunDir, spec: RunSpec, jobs: Mapping[str, SlurmJob]) -> list[Predecessor]:
    """Return the runs that `run` waits for: none once `run` has made an attempt. `jobs` are the user's queued jobs."""
    if not (spec.after or spec.after_ok) or History.load(run).attempts:
        return []
    listed = jobs_by_script(jobs.values())
    wanted = [*((path, False) for path in spec.after), *((path, True) for path in spec.after_ok)]
    return [_predecessor(RunDir(Path(path)), must_complete, listed) for path, must_complete in wanted]


def _predecessor(run: RunDir, must_complete: bool, listed: Mapping[str, list[SlurmJob]]) -> Predecessor:
    alive = [job for job in listed.get(os.path.realpath(run.script), ()) if job.state.alive]
    outcome = recorded_outcome(run)
    if outcome == "failed" and any(job.state is not JobState.ENDING for job in alive):
        outcome = None  # `hpc supervise` submits a failed run's next job before it records it
    return Predecessor(
        run=run, must_complete=must_complete, outcome=outcome, job_id=alive[-1].job_id if alive else None
    )


def recorded_outcome(run: RunDir) -> Outcome | Literal["removed"] | None:
    """Return how a run has ended, according to its directory; None if it goes on."""
    if not run.spec.exists():
        return "removed"
    run.refresh_result()
    return History.load(run).outcome


def dependency(run: RunDir, spec: RunSpec, jobs: Mapping[str, SlurmJob]) -> str:
    """Return Slurm's dependency for a run's job, such as `afterany:12:15`; empty if it waits for nothing.

    Raises:
        TorchrelayError: a run of --after-ok did not complete, or a run to wait for has no job.
    """
    predecessors = predecessors_of(run, spec, jobs)
    for predecessor in predecessors:
        if predecessor.problem:
            raise TorchrelayError(predecessor.problem)
    ids = [predecessor.job_id for predecessor in predecessors if predecessor.job_id]
    return ":".join(["afterany", *ids]) if ids else ""


def redirect_waiting_jobs(run: RunDir, replaced: tuple[str, str] | None = None) -> None:
    """Let jobs of other runs that wait for a run (`--after`) wait for its present job, or start if the run has ended.

    `replaced` are the ids of an old job of the run and of the new job that replaced it. Any job of the user that waits
    for the old job then waits for the new one.

    Raises:
        TorchrelayError: Slurm does not answer, or refuses the change.
    """
    if replaced:
        old, new = replaced
        for job_id, waits_for in squeue.dependencies().items():
            changed = re.sub(rf"(?<=:){old}(?!\d)", new, waits_for)
            if changed != waits_for:
                slurm.update(job_id, Dependency=changed)
    jobs = squeue.jobs()
    for script, own in jobs_by_script(jobs.values()).items():
        waiting = RunDir(Path(script).parent)
        for job in own:
            depends = job.state is JobState.PENDING and job.reason == "Dependency"
            held = job.state in {JobState.PENDING, JobState.ENDING} and job.reason == _HELD
            if (depends or held) and _waits_for(waiting, run):
                wait_again(waiting, job.job_id, jobs, held=held)


def _waits_for(waiting: RunDir, run: RunDir) -> bool:
    try:
        spec = RunSpec.load(waiting)
    except UserError:
        return False  # the spec is damaged
    return str(run.path.resolve()) in {*spec.after, *spec.after_ok}


def wait_again(run: RunDir, job_id: str, jobs: Mapping[str, SlurmJob], *, held: bool) -> None:
    """Update the dependency of a run's pending job, and release the job if `held`. If `dependency` fails, do nothing.

    Raises:
        TorchrelayError: Slurm does not answer, or refuses the change.
    """
    spec = RunSpec.load(run)
    try:
        waits_for = dependency(run, spec, jobs)
    except TorchrelayError:
        return  # hpc status shows the problem
    slurm.update(job_id, Dependency=waits_for)
    if held:
        slurm.release(job_id)
