"""`hpc cancel`: end a run for good. Runs on the login node.

Slurm ends the run's jobs first, which works on a full disk too. The event keeps agents and supervisors from continuing
the run, and ends the work of agents that scancel did not reach. A local run has only the event: its agents would take
the signal for a request to requeue.
"""

import getpass
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc import cli
from hpc.core import ledger
from hpc.core.errors import TorchrelayError
from hpc.core.kernel import is_alive
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.squeue import SlurmJob
from hpc.spec import RunSpec
from hpc.status.run_view import StatusCache, jobs_by_run

_OVER = frozenset({"completed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class CancelOptions(cli.RunOptions):
    """End a run for good: nothing requeues it again."""


def cancel(options: CancelOptions) -> int:
    """End the job and record it, or raise a TorchrelayError. A run that has ended stays as it is."""
    run = cli.find_own_run(options.run, options.runs_dir)
    on_slurm = RunSpec.load(run).cluster == "slurm"
    before = str(StatusCache().summary(run)["state"])
    problems = _end_jobs(run) if on_slurm else []
    # A failed run may be about to continue: the supervisor submits its next job.
    if before not in _OVER:
        try:
            EventWriter(run.cancellation).append("cancelled", by=getpass.getuser())
        except OSError as error:
            problems.append(f"the run may be requeued, because its cancellation cannot be recorded: {error}")
    if problems:
        raise TorchrelayError(f"run {run.name}: {'; '.join(problems)}; type hpc cancel again when that is over")
    if not on_slurm:
        for event in ledger.read(run.events):
            if event["event"] == "submitted" and is_alive(event["job_id"], event["started"]):
                os.kill(int(event["job_id"]), signal.SIGTERM)  # submitit's controller passes it on to the agents
    if options.json:
        state = before if before in _OVER else "cancelled"
        cli.print_json({"run": run.name, "run_dir": str(run.path), "state": state})
    elif before in _OVER:
        print(f"run {run.name} had already ended: {before}")
    else:
        print(f"run {run.name} is cancelled and will not be requeued")
    return 0


def _end_jobs(run: RunDir) -> list[str]:
    """Cancel the run's jobs, also those submitted by hand. Returns what went wrong."""
    try:
        jobs = slurm.jobs()
    except TorchrelayError as error:
        return [f"its job may still run, because Slurm does not list the jobs: {error}"]
    recorded = {event.get("job_id") for event in ledger.read(run.events)}
    own = {job.job_id for job in jobs_by_run([run], jobs)[run.path]}
    own |= {job.job_id for job in jobs.values() if job.job_id in recorded and _may_be_job_of(run, job)}
    problems = list[str]()
    for job_id in sorted(own):
        try:
            slurm.cancel(job_id)
        except TorchrelayError as error:
            problems.append(f"job {job_id} may still run: {error}")
    return problems


def _may_be_job_of(run: RunDir, job: SlurmJob) -> bool:
    """Whether a job that the ledger names is alive and runs the run's script, by whatever path it was submitted.

    The ledger of a copied run directory names the jobs of the original. Slurm gives ids again after some time.
    """
    command = Path(job.command)
    if not job.state.alive or command.parts[-2:] != run.script.parts[-2:]:
        return False
    try:
        return command.stat().st_ino == run.script.stat().st_ino
    except OSError:
        return True  # it was submitted where the same storage is mounted on another path


main = partial(cli.run, cancel, CancelOptions, "cancel")

if __name__ == "__main__":
    sys.exit(main())
