"""`hpc cancel`: end a run for good. Runs on the login node.

The event is recorded first: from then on no agent asks for a requeue, and a job that starts all the same does nothing.
"""

import getpass
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial

from hpc import cli
from hpc.core import ledger
from hpc.core.errors import TorchrelayError
from hpc.core.kernel import is_alive
from hpc.core.ledger import EventWriter
from hpc.slurm import client as slurm
from hpc.spec import RunSpec
from hpc.status.run_view import StatusCache, jobs_by_run

_OVER = frozenset({"completed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class CancelOptions(cli.RunOptions):
    """End a run for good: nothing requeues it again."""


def cancel(options: CancelOptions) -> int:
    """Record it, then end the job, or raise a TorchrelayError. A run that has ended stays as it is."""
    run = cli.find_own_run(options.run, options.runs_dir)
    before = str(StatusCache().summary(run)["state"])
    # A failed run may be about to continue: the supervisor submits its next job.
    if before not in _OVER:
        EventWriter(run.events / "cancel.jsonl").append("cancelled", by=getpass.getuser())
    if RunSpec.load(run).cluster == "slurm":
        try:
            # Also those submitted by hand.
            for job in jobs_by_run([run], slurm.jobs())[run.path]:
                slurm.cancel(job.job_id)
        except TorchrelayError as error:
            message = f"run {run.name} will not be requeued, but its job may still run: {error}; try again"
            raise TorchrelayError(message) from error
    else:
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


main = partial(cli.run, cancel, CancelOptions, "cancel")

if __name__ == "__main__":
    sys.exit(main())
