"""Cancels a run at its user's request. Runs on the login node.

The event `Cancelled` comes first: it keeps agents and supervisors from continuing the run, and ends agents that scancel
does not reach. An agent that submits a job at this moment looks for the event afterwards, so that one of the two sees
the other's act. On a full disk the event cannot be recorded, but the run's jobs are cancelled all the same.
"""

import os
import signal

from hpc.base.errors import TorchrelayError
from hpc.run.events.history import History
from hpc.run.events.kinds import Cancelled
from hpc.run.events.ledger import EventWriter
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import squeue
from hpc.slurm.alive import local_jobs, slurm_jobs
from hpc.slurm.predecessors import recorded_outcome, redirect_waiting_jobs

_OVER = frozenset({"completed", "cancelled"})


def cancel_run(run: RunDir, before: str, *, final: bool = False) -> bool:
    """Cancel a run, whose state is `before`. Return False if it was complete or cancelled. Raises TorchrelayError."""
    on_slurm = RunSpec.load(run).cluster == "slurm"
    # A failed run is cancelled, too, because a supervisor may be about to submit its next job.
    is_new = before not in _OVER or (final and before == "cancelled" and not History.load(run).is_cancelled_for_good)
    # If scancel ended the run, no outcome is recorded, and the runs that wait for it do not know that it has ended.
    is_new = is_new or recorded_outcome(run) is None
    problems = list[str]()
    # A cancelled run is cancelled again: an `hpc resume` under way takes back only cancellations that it has seen.
    if is_new or before == "cancelled":
        try:
            EventWriter(run.cancellation).append(Cancelled(final=final))
        except OSError as error:
            problems.append(f"the cancellation cannot be recorded, so the run may continue: {error}")
    if on_slurm:
        problems += _end_jobs(run)
    if on_slurm and not problems:
        # Let runs that wait for this one start, even if it had no job that Slurm could end.
        try:
            redirect_waiting_jobs(run)
        except TorchrelayError as error:
            problems.append(f"runs that wait for it may stay held: {error}")
    if problems:
        raise TorchrelayError(
            f"run {run.name}: {'; '.join(problems)}; type hpc cancel again when this problem is solved"
        )
    for job_id in [] if on_slurm else local_jobs(run):
        os.kill(int(job_id), signal.SIGTERM)  # submitit's controller passes it on to the agents
    return is_new


def _end_jobs(run: RunDir) -> list[str]:
    """Cancel the run's jobs, including those submitted by hand. Return error messages."""
    try:
        job_ids = slurm_jobs(run, squeue.jobs())
    except TorchrelayError as error:
        return [f"its job may still run, because Slurm does not list the jobs: {error}"]
    problems = list[str]()
    for job_id in job_ids:
        try:
            slurm.cancel(job_id)
        except TorchrelayError as error:
            problems.append(f"job {job_id} may still run: {error}")
    return problems
