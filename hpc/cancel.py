"""`hpc cancel`: end a run for good. Runs on the login node.

The ledger is told first: from then on no agent asks for a requeue, and a job that starts all the same does nothing.
"""

import getpass
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpc import cli, slurm
from hpc.ledger import Writer
from hpc.processes import is_alive
from hpc.rundir import RunDir
from hpc.spec import RunSpec
from hpc.summary import TERMINAL, jobs_of, summarize


@dataclass(frozen=True, kw_only=True)
class Cancel(cli.Common):
    """End a run for good: nothing requeues it again."""

    run: tyro.conf.Positional[str]
    """Run directory or name."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(cancel, Cancel, argv, "cancel")


def cancel(options: Cancel) -> int:
    """Write it down, then end the job. A run that has ended already stays as it is."""
    run = cli.find_run(options.run, options.runs_dir)
    spec = RunSpec.load(run)
    jobs = slurm.jobs() if spec.cluster == "slurm" else None
    before = summarize(run, jobs)
    if before["state"] not in TERMINAL:
        Writer(run.events / "cancel.jsonl").append("cancelled", by=getpass.getuser())
        if spec.cluster == "local":
            _cancel_local(before["job_id"])
        for job in jobs_of(run, jobs or {}):
            slurm.cancel(job.job_id)
    return _answer(options, run, before["state"])


def _cancel_local(pid: str) -> None:
    """Ask submitit's controller to stop; it passes the signal on to the agents."""
    if is_alive(pid):
        os.kill(int(pid), signal.SIGTERM)


def _answer(options: Cancel, run: RunDir, before: str) -> int:
    state = before if before in TERMINAL else "cancelled"
    if options.json:
        cli.print_json({"run": run.name, "run_dir": str(run.path), "state": state})
    elif before in TERMINAL:
        print(f"run {run.name} had ended already: {before}")
    else:
        print(f"run {run.name} is cancelled: nothing requeues it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
