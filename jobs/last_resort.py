"""The batch script's last resort: if no agent has ended the attempt and continued the run, this module does it.

In the first second of their job step, a signal kills agents, because they cannot handle it yet. A defect or lack of
memory may end them at any time. The batch script outlives them (hpc.slurm.executor) and runs, on the first node:

    python -m jobs.last_resort RUN_DIR EXIT_CODE_OF_SRUN
    python -m jobs.last_resort RUN_DIR EXIT_CODE SETUP_LINE

The first form runs after srun: all agents have ended, so none of them still submits the next job. The second form runs
before srun if a line of --setup fails: the next attempt avoids this node, and if the line fails again, the run fails.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from hpc.base.errors import EXIT_NO_SPACE, TorchrelayError
from hpc.base.files import refresh_nfs_cache
from hpc.base.kernel import ENDING_SIGNALS
from hpc.run.causes import Cause, JobState
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import NotContinued, Requeued, Resubmitted
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import handover, job_fields
from jobs import claim
from jobs.ending import conclude_failed_agent, continue_ended_run
from jobs.node_attempt import (
    NodeAllocation,
    NodeAttempt,
    await_storage,
    find_allocation,
    load_own_spec,
    log,
    send_heartbeats,
)

# A shell adds this to the number of the signal that killed a program.
_BY_SIGNAL = 128
_POLL_SECONDS = 2.0


def main(argv: list[str]) -> int:
    """End the attempt and continue the run, if the agents have not. Returns the exit code of the batch script."""
    exit_code = _do_the_rest(argv)
    if exit_code != 0:
        _let_job_fail()
    return exit_code


def _let_job_fail() -> None:
    """Let this failed job end: if it is expedited, forbid its requeue, because Slurm would requeue and hold it."""
    try:
        job_id = find_allocation(os.environ).job_id
        job = slurm.show_job(job_id)
        # A job that agents have requeued no longer runs: leave it alone.
        if job_fields.is_expedited(job) and job.get("JobState") == JobState.RUNNING:
            slurm.update(job_id, Requeue="0")
    except TorchrelayError as error:
        log(f"Slurm may requeue and hold this job, which has failed: then cancel it with scancel ({error})")


def _do_the_rest(argv: list[str]) -> int:
    run, exit_code = RunDir(Path(argv[0])), int(argv[1])
    try:
        if not await_storage(run, lambda: False, run.path.exists):
            return exit_code  # the agents have said so, and have ended the job
        allocation = find_allocation(os.environ)
        spec, attempt = await_storage(run, lambda: False, partial(_load, run, allocation))
    except (TorchrelayError, OSError) as error:
        log(str(error))
        return exit_code
    if attempt is None:
        return exit_code
    send_heartbeats(run)  # saving a snapshot, or waiting for Slurm's controller, may take minutes
    number = exit_code - _BY_SIGNAL
    killed_by = next((sent.name for sent in signal.Signals if sent == number), None)
    node = NodeAttempt(run=run, spec=spec, allocation=allocation, attempt=attempt)
    if attempt.cause is not None:
        return continue_ended_run(node, Cause(attempt.cause))
    ended_with = f"ended with {killed_by or f'exit code {exit_code}'}"
    look = "see the end of hpc logs --all"
    detail = f"srun ended with exit code {exit_code}, and the agents of the job recorded no reason: {look}"
    if killed_by:
        detail = f"all agents of the job were killed ({killed_by}): {look}"
    cause = Cause.LOST
    if exit_code == EXIT_NO_SPACE:
        cause, detail = Cause.NO_SPACE, "the storage of the run directory had no space for the events of the attempt"
    if len(argv) > 2:
        cause, detail = Cause.BAD_NODE, f"--setup {argv[2]!r} {ended_with}: see hpc logs --all"
    stopped_by = killed_by if number in ENDING_SIGNALS else None
    return conclude_failed_agent(node, cause, detail, stopped_by)


def _load(run: RunDir, allocation: NodeAllocation) -> tuple[RunSpec, Attempt | None]:
    spec = load_own_spec(run)
    return spec, _unfinished_attempt(run, spec, allocation)


def _unfinished_attempt(run: RunDir, spec: RunSpec, allocation: NodeAllocation) -> Attempt | None:
    """Return the attempt of this job start, or a new one if no agent claimed one; None if nothing is left to do.

    Raises:
        TorchrelayError: the run was cancelled, or another job works on it.
    """
    history = _await_handover(run)
    if claim.why_nothing_started(history, allocation) is not None:
        return None
    for attempt in history.attempts:
        if attempt.job_start == allocation.job_start:
            decided = Requeued | Resubmitted | NotContinued
            has_gone_on = any(isinstance(event, decided) for event in history.during(attempt.attempt).events)
            is_over = attempt.ended is not None and (has_gone_on or not history.may_restart)
            return None if is_over else attempt
    is_replaced = any(event.old_job_id == allocation.job_id for event in history.of(Resubmitted))
    if history.is_complete or is_replaced:
        return None
    # A run waits for other runs only before its first attempt, so claim that attempt only after the wait.
    return None if claim.must_wait(run, spec, allocation) else claim.claim_next(run, allocation, 0, "")


def _await_handover(run: RunDir) -> History:
    """Return the run's history once no process that has claimed its next job may still submit it.

    The process may be an agent on another node, which was killed before it could submit a job or requeue this one.
    """
    while True:
        refresh_nfs_cache(run.events)
        history = History.load(run)
        number = history.last_attempt.attempt if history.last_attempt else 0
        if time.time() >= handover.handover_deadline(history.unfinished_handover(number)):
            return history
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
