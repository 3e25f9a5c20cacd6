"""The handover from one job of a run to the next: one process records an attempt's end and submits the new job.

Runs on compute nodes, in agents that survive their head node, and on the login node, in the supervisor.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc.base.errors import TorchrelayError
from hpc.base.files import (
    last_json_line,
    modified,
    refresh_nfs_cache,
    storage_time,
)
from hpc.base.kernel import is_alive, start_time
from hpc.run.causes import Cause, JobState
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import (
    AttemptEnded,
    Event,
    Handover,
    Interrupted,
    NodeFailed,
    NodeLost,
    NodeReturned,
    RankFailed,
    Resubmitting,
)  # fmt: skip
from hpc.run.events.ledger import record_once
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm.predecessors import dependency
from hpc.slurm.reservations import shorter_limit
from hpc.slurm.squeue import jobs_by_script

# A failed node has probably been rebooted or repaired after this time.
_EXCLUDE_SECONDS = 6 * 3600.0
# sbatch errors that mean --exclude left too few nodes; 24.11 prints the second if --nodelist names an excluded node.
_TOO_FEW_NODES = ("not available", "Invalid node name specified")
# slurmstepd prints this, with the local time to the second.
_PREEMPTED = re.compile(rb"CANCELLED AT ([-:T\d]+) DUE TO PREEMPTION")
# The agents print little after this line.
_LOG_BYTES = 2**17
HANDOVER_SECONDS = 100.0
"""The longest handover, by an agent or a supervisor: at most three of Slurm's commands, with their timeouts."""


def record_end(run: RunDir, ended: AttemptEnded) -> bool:
    """Record the end of an attempt. Return False if another process has recorded it: its record stays.

    Agents that still work on the attempt exit within seconds.

    Raises:
        OSError: the file could not be written.
    """
    return record_once(_end_file(run, ended.attempt), ended)


def record_missing_end(
    run: RunDir, last: Attempt, detail: str, *, cause: Cause = Cause.LOST, suspect: str | None = None
) -> bool:
    """Record the end of an attempt whose agents did not, at its last heartbeat. Returns False as `record_end` does.

    If Slurm has marked a node of the attempt down, that is the cause. If not, the node `suspect`, if any, is recorded.
    """
    spec = RunSpec.load(run)
    if cause is Cause.LOST and was_preempted(run, last.job_id, last.started):
        cause, suspect = Cause.PREEMPTED, None
    if spec.cluster == "slurm" and cause in {Cause.LOST, Cause.NODE_FAILURE}:
        try:
            if dead := slurm.dead_nodes(list(last.nodes)):
                cause, suspect, detail = Cause.NODE_FAILURE, dead[0], f"{detail}; down: {', '.join(dead)}"
        except TorchrelayError as error:
            detail = f"{detail}; Slurm does not report its nodes: {error}"
    heartbeat = modified(run.alive) or 0.0
    ended = AttemptEnded(
        attempt=last.attempt, cause=cause, detail=detail, node=suspect,
        step=last_step(run) or (0 if spec.program.reports_steps else None),
        # The file `alive` may be older than the attempt, and its storage may have another clock.
        last_heard=max(last.started, heartbeat + time.time() - storage_time(run.path)),
    )  # fmt: skip
    return record_end(run, ended)


def was_preempted(run: RunDir, job_id: str, since: float) -> bool:
    """Return whether Slurm has preempted a job since a time, according to the job's log.

    With GraceTime=0 only the log says so: in `scontrol show job` such a preemption looks like a requeue.
    """
    try:
        with (run.logs / f"{job_id}_0_log.out").open("rb") as log:
            log.seek(-min(_LOG_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            times = _PREEMPTED.findall(log.read())
        return any(datetime.fromisoformat(at.decode()).timestamp() >= int(since) for at in times)
    except (OSError, ValueError):
        return False


def has_ended(run: RunDir, attempt: int) -> bool:
    """Return whether the end of an attempt is recorded."""
    refresh_nfs_cache(run.events)
    return _end_file(run, attempt).exists()


def _end_file(run: RunDir, attempt: int) -> Path:
    return run.events / f"{ledger.attempt_prefix(attempt)}end.jsonl"


def last_step(run: RunDir) -> int | None:
    """Return the last step in the metrics; None before the first step, and for a user's script."""
    record = last_json_line(run.train_metrics)
    return None if record is None else record.get("step")


def handover_deadline(claim: Handover | None) -> float:
    """Return the time until which the process that made a claim may finish; 0 if it died, or if there is no claim."""
    if claim is None or (claim.host == socket.gethostname() and not is_alive(claim.pid, claim.started)):
        return 0.0
    return claim.time + HANDOVER_SECONDS


def this_process() -> dict[str, Any]:
    """Return the fields of a claim that name its process, so that `handover_deadline` knows whether it is alive."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}


def claim_next_job(run: RunDir, attempt: int, seen: History) -> bool:
    """Claim the submission of the job after an attempt. Return False if another agent or a supervisor has claimed it.

    Only one of the processes that decide from the same events creates the file.
    """
    if time.time() < handover_deadline(seen.unfinished_handover(attempt)):
        return False
    number = len(seen.of(Resubmitting)) + 1
    return record_once(run.events / f"next-{number:03d}.jsonl", Resubmitting(attempt=attempt, **this_process()))


def has_own_script(run: RunDir) -> bool:
    """Return whether the run's script names this directory, not another from which this one was copied or moved."""
    for line in run.script.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a comment may have an unclosed quote
            if str(run.path) in shlex.split(line):  # the line quotes a path with blanks and quotes
                return True
    return False


def submit_next_job(run: RunDir, spec: RunSpec, excluded: Sequence[str], old: Collection[str]) -> str:
    """Submit the run's next job, unless it is in the queue: the reply of an earlier sbatch may have been lost.

    `excluded` comes from `nodes_to_exclude`, and `old` are the ids of the run's jobs so far. Returns the id of the next
    job.

    Raises:
        TorchrelayError: sbatch refused it; or a run to wait for was to complete and did not, or has no job.
    """
    jobs = slurm.jobs()
    for job in jobs_by_script(jobs.values()).get(os.path.realpath(run.script), []):
        if job.state in {JobState.PENDING, JobState.RUNNING} and job.job_id not in old:
            if job.state is JobState.PENDING:
                # Its sbatch may have excluded other nodes. If the change is refused, it keeps those.
                with contextlib.suppress(TorchrelayError):
                    slurm.set_excluded_nodes(job.job_id, excluded)
            return job.job_id
    environment = json.loads(run.environment.read_text()) if run.environment.exists() else None
    waits_for, shorter = dependency(run, spec, jobs), shorter_limit(spec)
    more = shorter.options if shorter else []
    try:
        return slurm.submit(run.script, excluded, environment, waits_for, more)
    except TorchrelayError as error:
        given = _given(spec)
        # With a constraint or a kind of GPU, fewer nodes fit than `nodes_to_exclude` counted in the partition; and
        # --sbatch nodelist may name an excluded node.
        if excluded == given or not any(words in str(error) for words in _TOO_FEW_NODES):
            raise
        return slurm.submit(run.script, given, environment, waits_for, more)


def _failed_node(event: Event) -> str | None:
    """Return the node that has failed according to an event."""
    if isinstance(event, NodeLost):
        return event.node
    causes = {Cause.BAD_NODE, Cause.LOST, Cause.NODE_FAILURE}
    if isinstance(event, Interrupted | AttemptEnded | NodeFailed | RankFailed) and event.cause in causes:
        return event.node
    return None


def _given(spec: RunSpec) -> list[str]:
    return [spec.resources.exclude] if spec.resources.exclude else []


def nodes_to_exclude(spec: RunSpec, history: History, failed: Sequence[str] = ()) -> list[str]:
    """Return the nodes that the next job of a run excludes: the user's --exclude, and nodes that failed recently.

    It excludes failed nodes only as long as the partition has enough other nodes for the job.
    """
    given, now = _given(spec), time.time()
    returned = {event.node: event.time for event in history.of(NodeReturned)}
    lost = [
        node
        for event in history.events
        if now - event.time < _EXCLUDE_SECONDS
        if (node := _failed_node(event)) and event.time > returned.get(node, 0.0)
    ]
    names = list(dict.fromkeys([*failed, *reversed(lost)]))  # newest first
    if not names:
        return given
    # Slurm does not use nodes that it has marked down.
    usable = slurm.usable_nodes(spec.resources.partition)
    usable -= {name for nodes in given for name in slurm.hostnames(nodes)}
    spare = max(0, len(usable) - spec.job_nodes[0])
    if len(usable.intersection(failed)) > spare:
        return given  # the job needs some of the failed nodes, and which of them work is unknown
    return [*given, *[name for name in names if name in usable][:spare]]
