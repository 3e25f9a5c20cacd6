"""How an attempt ended, and whether the run goes on. Runs on compute nodes, in the head node's agent."""

import time
from dataclasses import replace

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpc import ledger, slurm
from hpc.attempts import attempts_of, failures_in_a_row
from hpc.errors import TorchrelayError
from hpc.files import last_json_line
from hpc.outcome import Cause, Ending, cause_of, goes_on, must_requeue
from hpc.rundir import RunDir
from hpc.slurm import JobState
from jobs.node import Node

_POLL_SECONDS, _RETRY_SECONDS = 0.5, 3.0
# By then Slurm has marked a node that does not answer (SlurmdTimeout is 300 s, unless the administrators changed it).
_OTHERS_SECONDS = 400.0
_REQUEUE_SECONDS = 600.0


def conclude(node: Node, exit_code: int, detail: str | None) -> int:
    """Write down how the attempt ended and see that the run goes on, if it should. Returns the exit code."""
    others = [] if node.run.final_result.exists() else _wait_for_others(node)
    ending = _look(node, exit_code == 0 and all(code == 0 for code in others))
    cause = cause_of(ending)
    if cause is Cause.CRASHED and detail is None:
        detail = _why(node, exit_code)
    node.note("attempt_ended", cause=cause, step=last_step(node.run), detail=detail)
    print(f"torchrelay: attempt {node.attempt.attempt} ended: {cause}{f' ({detail})' if detail else ''}", flush=True)
    if must_requeue(cause, ending):
        if node.place.cluster == "slurm":
            _requeue(node.place.job_id)
        node.note("requeued", job_id=node.place.job_id)
        return 0 if node.place.cluster == "slurm" else LOCAL_REQUEUE_RETURN_CODE
    return 0 if cause is Cause.COMPLETED or goes_on(cause, ending.failures) else 1


def _wait_for_others(node: Node) -> list[int]:
    """The exit codes of the other nodes' torchruns, once all have ended or Slurm calls the silent ones dead.

    A requeue with a dead node that Slurm has not noticed restarts the job without its GPUs and leaks them (22.05).
    """
    deadline = time.monotonic() + _OTHERS_SECONDS
    others = range(1, node.place.num_nodes)
    while True:
        left = {event["node_rank"]: event["exit_code"] for event in node.events("left") if event["node_rank"]}
        silent = [node.place.hostnames[rank] for rank in others if rank not in left]
        if not silent or time.monotonic() > deadline or (node.place.cluster == "slurm" and _are_dead(silent)):
            return list(left.values())
        time.sleep(_POLL_SECONDS)


def _are_dead(names: list[str]) -> bool:
    try:
        return len(slurm.dead_nodes(names)) == len(names)
    except TorchrelayError:
        return False


def _requeue(job_id: str) -> None:
    """Ask Slurm for the requeue, for longer than a fail-over of its controller takes (SlurmctldTimeout, 120 s).

    Raises:
        TorchrelayError: it refused to the end.
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


def _look(node: Node, clean_exit: bool) -> Ending:
    """Gather what tells how the attempt ended."""
    # NFS remembers for a while that a name was not there, unless the directory changes under our own hands.
    node.run.path.chmod(0o700)
    finished = node.run.final_result.exists() if node.spec.train else clean_exit and not node.stop
    events = ledger.read(node.run.events)
    *earlier, this = attempts_of(events)
    fields = _show_job(node)
    return Ending(
        finished=finished,
        cancelled=any(event["event"] == "cancelled" for event in events),
        signal=node.stop.signal.name if node.stop.signal else None,
        job_state=slurm.ending_state(fields, node.place.restart) if fields else JobState.RUNNING,
        preempted=slurm.is_preempted(fields),
        failures=failures_in_a_row([*earlier, replace(this, cause=Cause.CRASHED, last_step=last_step(node.run))]),
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
