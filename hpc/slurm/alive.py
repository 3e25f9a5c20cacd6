"""Finds the jobs of a run that are alive, for code that is about to act on the run. Runs on the login node."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.kernel import is_alive
from hpc.base.text import visible
from hpc.run.causes import JobState
from hpc.run.events.history import History
from hpc.run.events.kinds import Submitted
from hpc.run.rundir import RunDir
from hpc.slurm import squeue
from hpc.slurm.squeue import SlurmJob, jobs_by_script

# The longest wait for the end of the job of a run that has ended. Most jobs save and end sooner.
_ENDING_SECONDS = 60.0


def slurm_jobs(run: RunDir, jobs: Mapping[str, SlurmJob]) -> list[str]:
    """Return the ids of the run's jobs among squeue's `jobs` that may be alive, including jobs submitted by hand."""
    recorded = History.load(run).job_ids
    own = {job.job_id for job in jobs_by_run([run], jobs)[run.path]}
    by_hand = {job.job_id for job in jobs.values() if job.job_id in recorded and _may_be_job_of(run, job)}
    return sorted(own | by_hand, key=lambda job_id: (len(job_id), job_id))  # 99999 comes before 100000


def local_jobs(run: RunDir) -> list[str]:
    """Return the process ids of a local run's submitit controllers that are alive on this machine."""
    submitted = [event for event in History.load(run).of(Submitted) if event.started]
    return [event.job_id for event in submitted if is_alive(event.job_id, event.started)]


def job_of(run: RunDir) -> str | None:
    """Return words that name the run's job, running or queued, or its local process; None if there is none."""
    if run.script.exists():
        listed = squeue.jobs()
        found = [f"job {job_id}, which is {listed[job_id].state.lower()}" for job_id in slurm_jobs(run, listed)]
    else:
        found = [f"process {pid}" for pid in local_jobs(run)]
    return next(iter(found), None)


def wait_for_ending_job(run: RunDir) -> None:
    """If the run has ended, wait up to a minute for the end of its job, which outlives the run's last event."""
    if History.load(run).outcome is None or not (job := job_of(run)):
        return
    print(visible(f"run {run.name} is ending: waiting for the end of {job}"), file=sys.stderr)
    deadline = time.monotonic() + _ENDING_SECONDS
    while job_of(run) and time.monotonic() < deadline:
        time.sleep(1)


def _may_be_job_of(run: RunDir, job: SlurmJob) -> bool:
    """Return whether a job in the ledger is alive and runs the run's script, by whatever path it was submitted.

    The id is not enough: the ledger of a copied run directory names the original's jobs, and Slurm reuses ids.
    """
    command = Path(job.command)
    if not job.state.alive or command.parts[-2:] != run.script.parts[-2:]:
        return False
    try:
        return command.stat().st_ino == run.script.stat().st_ino
    except OSError:
        return True  # the job was submitted where the same storage has another path


def running_job(run: RunDir) -> SlurmJob:
    """Return the running job of a run. Raises UserError if the run has none."""
    if not run.script.exists():
        raise UserError(f"run {run.name} has no job: it runs on this machine (--cluster local)")
    jobs = squeue.jobs()
    running = [jobs[job_id] for job_id in slurm_jobs(run, jobs) if jobs[job_id].state is JobState.RUNNING]
    if not running:
        raise UserError(f"run {run.name} has no running job: hpc status {run.name} says why")
    return running[-1]


def jobs_by_run(runs: Sequence[RunDir], jobs: Mapping[str, SlurmJob]) -> dict[Path, list[SlurmJob]]:
    """Return each run's jobs in the queue, by run directory, running jobs first. Includes jobs submitted by hand."""
    # A job in an unknown state may be alive.
    scripts = jobs_by_script(job for job in jobs.values() if job.state.alive or job.state is JobState.UNKNOWN)
    own = {run.path: scripts.get(os.path.realpath(run.script), []) for run in runs}
    return {path: sorted(of_run, key=lambda job: job.state is not JobState.RUNNING) for path, of_run in own.items()}
