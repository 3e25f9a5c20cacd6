"""How an attempt ended, and whether the run goes on. Runs on compute nodes, in the head node's agent."""

import time

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc import ledger, slurm
from hpc.attempts import attempts_of
from hpc.errors import TorchrelayError
from hpc.files import last_json_line
from hpc.outcome import Cause, Ending, cause_of, goes_on, must_requeue
from hpc.rundir import RunDir
from hpc.slurm import JobState
from jobs.node import Node

_REQUEUE_SECONDS, _RETRY_SECONDS = 60.0, 3.0


def conclude(node: Node, exit_code: int, detail: str | None) -> int:
    """Write down how the attempt ended and see that the run goes on, if it should. Returns the exit code."""
    ending = _look(node, exit_code)
    cause = cause_of(ending)
    if cause is Cause.CRASHED and detail is None:
        detail = _why(node, exit_code)
    number = node.attempt.attempt
    node.writer.append("attempt_ended", attempt=number, cause=cause, step=last_step(node.run), detail=detail)
    print(f"torchrelay: attempt {number} ended: {cause}{f' ({detail})' if detail else ''}", flush=True)
    if must_requeue(cause, ending):
        node.writer.append("requeued", attempt=number, job_id=node.place.job_id)
        if node.place.cluster == "local":
            return LOCAL_REQUEUE_RETURN_CODE
        _requeue(node.place.job_id)
    return 0 if cause is Cause.COMPLETED or goes_on(cause, progressed=ending.progressed) else 1


def _requeue(job_id: str) -> None:
    """Ask Slurm for the requeue, for as long as a restart of its controller may take.

    Raises:
        TorchrelayError: it refused, or did not answer, to the end.
    """
    deadline = time.monotonic() + _REQUEUE_SECONDS
    while True:
        try:
            return slurm.requeue(job_id)
        except TorchrelayError as error:
            if time.monotonic() > deadline:
                raise
            print(f"torchrelay: the requeue failed, trying again: {error}", flush=True)
            time.sleep(_RETRY_SECONDS)


def _why(node: Node, exit_code: int) -> str:
    failures = [f"{event['node']}: {event['detail']}" for event in node.events("node_failed")]
    logs = node.run.attempt_logs(node.attempt.attempt)
    return "; ".join(failures) or f"torchrun exited with {exit_code}: see {logs}"


def _look(node: Node, exit_code: int) -> Ending:
    """Gather what tells how the attempt ended."""
    finished = node.run.final_result.exists() if node.spec.train else exit_code == 0 and not node.stop
    events = ledger.read(node.run.events)
    earlier = [attempt.last_step or 0 for attempt in attempts_of(events)[:-1]]
    fields = _show_job(node)
    state = slurm.ending_state(fields, node.place.restart) if fields else JobState.RUNNING
    return Ending(
        exit_code=exit_code,
        finished=finished,
        cancelled=any(event["event"] == "cancelled" for event in events),
        signal=node.stop.signal.name if node.stop.signal else None,
        job_state=state,
        preempted=fields.get("PreemptTime", "None") not in {"None", "N/A", ""},
        progressed=(last_step(node.run) or 0) > max(earlier, default=0),
    )


def _show_job(node: Node) -> dict[str, str]:
    """What Slurm says of the job; nothing without Slurm, and while its controller does not answer."""
    if node.place.cluster == "local":
        return {}
    try:
        return slurm.show_job(node.place.job_id)
    except TorchrelayError as error:
        print(f"torchrelay: Slurm does not say how it ends this job: {error}", flush=True)
        return {}


def last_step(run: RunDir) -> int | None:
    """The last step in the metrics; None before the first, and for a script, which has none."""
    record = last_json_line(run.train_metrics)
    return None if record is None else record.get("step")
