"""`hpc cancel`: end runs. `hpc resume` continues them, unless they were ended with --final. Runs on the login node.

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

import tyro

from hpc import cli
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.events.history import History
from hpc.core.events.kinds import Cancelled
from hpc.core.events.ledger import EventWriter
from hpc.core.ownership import check_is_own
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.slurm import client as slurm
from hpc.slurm.predecessors import recorded_outcome, redirect_waiting_jobs
from hpc.spec import RunSpec
from hpc.status.alive import local_jobs, slurm_jobs
from hpc.status.run_view import StatusCache

_OVER = frozenset({"completed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class CancelOptions(cli.RunsOptions):
    """Stop runs and keep them from being requeued. hpc resume continues them from the last saved step."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run directories or names; also those of sweeps and scaling studies."""
    final: bool = False
    """Stop the runs for good: hpc resume refuses to continue them."""


def cancel(options: CancelOptions) -> int:
    """End the runs and record it; 1 if one of them may go on. Runs that have ended stay as they are."""
    if not options.run:
        raise UserError("no run is named: type hpc cancel NAME, or several names; hpc status lists them")
    runs = cli.find_runs(options.run, options.runs_dir)
    for run in runs:
        check_is_own(run)
    for group in filter(None, (cli.find_group(name, options.runs_dir) for name in options.run)):
        (group / cli.CANCELLED_GROUP).touch()  # marked before the runs end: it starts others in their place
    answers, problems = list[dict[str, str]](), list[str]()
    cache = StatusCache()
    for run in runs:
        try:
            before = str(cache.summary(run).state)
            is_new = cancel_run(run, before, final=options.final)
            answers.append({"run": run.name, "run_dir": str(run.path), "state": "cancelled" if is_new else before})
            if not options.json:
                _show(run, before if not is_new else None, final=options.final)
        except TorchrelayError as error:
            problems.append(str(error))
            answers.append({"run": run.name, "run_dir": str(run.path), "error": str(error)})
    if options.json:
        cli.print_json(answers)
    for problem in problems:
        print(f"hpc cancel: {visible(problem)}", file=sys.stderr)
    return int(bool(problems))


def cancel_run(run: RunDir, before: str, *, final: bool = False) -> bool:
    """End one run, whose state was `before`; False: it had ended. Raises TorchrelayError if a part of this failed."""
    on_slurm = RunSpec.load(run).cluster == "slurm"
    problems = _end_jobs(run) if on_slurm else []
    # A supervisor may be about to submit the next job of a failed run.
    is_new = before not in _OVER or (final and before == "cancelled" and not _is_final(run))
    # A run that scancel ended has no recorded outcome: the runs that wait for it do not know.
    is_new = is_new or recorded_outcome(run) is None
    if is_new:
        try:
            EventWriter(run.cancellation).append(Cancelled(by=getpass.getuser(), final=final))
        except OSError as error:
            problems.append(f"the cancellation cannot be recorded, so the run may continue: {error}")
    if on_slurm and not problems:
        problems += _release_waiting_jobs(run)
    if problems:
        raise TorchrelayError(
            f"run {run.name}: {'; '.join(problems)}; type hpc cancel again when this problem is solved"
        )
    for job_id in [] if on_slurm else local_jobs(run):
        os.kill(int(job_id), signal.SIGTERM)  # submitit's controller passes it on to the agents
    return is_new


def _release_waiting_jobs(run: RunDir) -> list[str]:
    """Start the runs that wait for this one, if it had no job. Returns what went wrong."""
    try:
        redirect_waiting_jobs(run)
    except TorchrelayError as error:
        return [f"runs that wait for it may stay held: {error}"]
    return []


def _show(run: RunDir, before: str | None, *, final: bool) -> None:
    """Print what was done; `before` is the state of a run that had ended."""
    after = "for good" if final else f"and will not be requeued; {cli.own_command()} resume {run.name} continues it"
    end = f"is cancelled {after}" if before is None else f"had already ended: {before}"
    print(visible(f"run {run.name} {end}"))


def _is_final(run: RunDir) -> bool:
    return History.load(run).is_cancelled_for_good


def _end_jobs(run: RunDir) -> list[str]:
    """Cancel the run's jobs, also those submitted by hand. Returns what went wrong."""
    try:
        found = slurm_jobs(run, slurm.jobs())
    except TorchrelayError as error:
        return [f"its job may still run, because Slurm does not list the jobs: {error}"]
    problems = list[str]()
    for job_id in found:
        try:
            slurm.cancel(job_id)
        except TorchrelayError as error:
            problems.append(f"job {job_id} may still run: {error}")
    return problems


main = partial(cli.run, cancel, CancelOptions, "cancel")

if __name__ == "__main__":
    sys.exit(main())
