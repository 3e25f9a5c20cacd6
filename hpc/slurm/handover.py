"""The handover from one job of a run to the next: one process records an attempt's end and submits the new job.

Runs on compute nodes, in the agents, and on the login node, in `hpc supervise` and `hpc resume`.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hpc.base.errors import TorchrelayError
from hpc.base.files import last_json_line, modified, refresh_nfs_cache, storage_time
from hpc.base.kernel import is_alive, start_time
from hpc.run.causes import Cause, JobState
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, Handover, Resubmitting
from hpc.run.events.ledger import record_once
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import bad_nodes, sinfo, squeue, submission
from hpc.slurm import client as slurm
from hpc.slurm.predecessors import dependency
from hpc.slurm.squeue import jobs_by_script

# slurmstepd prints these lines to the job's log. Their times say nothing here: they are in the node's time zone.
_PREEMPTED = re.compile(rb"CANCELLED AT .* DUE TO PREEMPTION")
_SCANCELLED = re.compile(rb"\*\*\* JOB \d+ ON \S+ CANCELLED AT (?!.* DUE TO )")
# The batch script prints this line first (`start_line`): a requeued job appends to the log of its earlier starts.
_JOB_START = re.compile(rb"^torchrelay: start (\d+) of job ", re.MULTILINE)
# Bytes to search at the end of the log: the agents print little after slurmstepd's line.
_LOG_BYTES = 2**17
HANDOVER_SECONDS = 100.0
"""Seconds that a handover may take, for example if three of Slurm's commands time out."""


def record_end(run: RunDir, ended: AttemptEnded) -> bool:
    """Record the end of an attempt. If another process has already recorded one, keep that and return False.

    Agents that still work on the attempt see the record, and exit within seconds.

    Raises:
        OSError: the file could not be written.
    """
    return record_once(_end_file(run, ended.attempt), ended)


def record_missing_end(
    run: RunDir, last: Attempt, detail: str, *, cause: Cause = Cause.LOST, suspect: str | None = None
) -> bool:
    """Record the missing end of an attempt, at its last heartbeat. Return False if another process was first.

    A preemption of the job, or a node that Slurm has marked down, may replace `cause` and the node `suspect`.
    """
    spec = RunSpec.load(run)
    if cause is Cause.LOST and was_preempted(run, last):
        cause, suspect = Cause.PREEMPTED, None
    if spec.cluster == "slurm" and cause in {Cause.LOST, Cause.NODE_FAILURE}:
        try:
            if dead := sinfo.dead_nodes(list(last.nodes)):
                cause, suspect, detail = Cause.NODE_FAILURE, dead[0], f"{detail}; down: {', '.join(dead)}"
        except TorchrelayError as error:
            detail = f"{detail}; Slurm does not report its nodes: {error}"
    heartbeat = modified(run.alive) or 0.0
    ended = AttemptEnded(
        attempt=last.attempt, cause=cause, detail=detail, node=suspect,
        step=last_step(run, last.attempt) or (0 if spec.program.reports_steps else None),
        # The file `alive` may be older than the attempt, and its storage may have another clock.
        last_heard=max(last.started, heartbeat + time.time() - storage_time(run.path)),
    )  # fmt: skip
    if not record_end(run, ended):
        return False
    if spec.cluster == "slurm":
        with contextlib.suppress(OSError):  # the end is recorded; that other runs meet the node costs them little
            bad_nodes.learn(run, ended)
    return True


def start_line() -> str:
    """Return the shell command with which a job's script marks its start in the log, for `_log_of_start`."""
    return 'echo "torchrelay: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID"'


def was_preempted(run: RunDir, attempt: Attempt) -> bool:
    """Return whether Slurm has preempted the job since the start that made an attempt, according to the job's log.

    With GraceTime=0 only the log says so: in `scontrol show job` such a preemption looks like a requeue.
    """
    return _PREEMPTED.search(_log_of_start(run, attempt)) is not None


def was_scancelled(run: RunDir, attempt: Attempt) -> bool:
    """Return whether somebody has cancelled the job since the start that made an attempt, according to the job's log.

    In the grace time of a preemption only the log says so: PreemptTime stays, and the job is COMPLETING in both cases.
    """
    return _SCANCELLED.search(_log_of_start(run, attempt)) is not None


def _log_of_start(run: RunDir, attempt: Attempt) -> bytes:
    """Return the end of the job's log, but nothing of other starts of the job; nothing without a log."""
    try:
        with (run.logs / f"{attempt.job_id}_0_log.out").open("rb") as log:
            log.seek(-min(_LOG_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            text = log.read()
    except OSError:
        return b""
    starts = [(int(line[1]), line) for line in _JOB_START.finditer(text)]
    begin = max((line.end() for number, line in starts if number <= attempt.restart), default=0)
    end = min((line.start() for number, line in starts if number > attempt.restart), default=len(text))
    return text[begin:end]


def has_ended(run: RunDir, attempt: int) -> bool:
    """Return whether the end of an attempt is recorded."""
    refresh_nfs_cache(run.events)
    return _end_file(run, attempt).exists()


def _end_file(run: RunDir, attempt: int) -> Path:
    return run.events / f"{ledger.attempt_prefix(attempt)}end.jsonl"


def last_step(run: RunDir, attempt: int | None = None) -> int | None:
    """Return the last step in metrics/train.jsonl, with `attempt` only if that attempt has written it.

    A script may write this file: return None if its last line has no whole number as a step.
    """
    last = last_json_line(run.train_metrics) or {}
    step, is_of_attempt = last.get("step"), attempt is None or last.get("attempt", attempt) == attempt
    return step if type(step) is int and is_of_attempt else None


def handover_deadline(claim: Handover | None) -> float:
    """Return the time until which the claiming process may still submit; 0 if it died, or if `claim` is None."""
    if claim is None or (claim.host == socket.gethostname() and not is_alive(claim.pid, claim.started)):
        return 0.0
    return claim.time + HANDOVER_SECONDS


def this_process() -> dict[str, Any]:
    """Return the fields of a claim that identify this process, so that `handover_deadline` knows whether it lives."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}


def claim_next_job(run: RunDir, attempt: int, seen: History) -> bool:
    """Claim the submission of the job after an attempt. Return False if another process has a claim that still holds.

    Of several processes that have `seen` the same events, only one can create the file of the claim.
    """
    if time.time() < handover_deadline(seen.unfinished_handover(attempt)):
        return False
    number = len(seen.of(Resubmitting)) + 1
    return record_once(run.events / f"next-{number:03d}.jsonl", Resubmitting(attempt=attempt, **this_process()))


def has_own_script(run: RunDir) -> bool:
    """Return whether the run's script names this directory; False if the directory was copied or moved."""
    for line in run.script.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a comment may have an unclosed quote
            if str(run.path) in shlex.split(line):  # a path with blanks or quotes is quoted in the line
                return True
    return False


def submit_next_job(run: RunDir, spec: RunSpec, excluded: Sequence[str], old: Collection[str]) -> str:
    """Submit the run's next job and return its id. If an earlier sbatch queued a job unnoticed, return its id.

    `excluded` comes from `bad_nodes.nodes_to_exclude`, and `old` are the ids of the run's jobs so far.

    Raises:
        TorchrelayError: sbatch refused the job; or a run of --after-ok did not complete, or a run to wait for has no
            job.
    """
    jobs = squeue.jobs()
    for job in jobs_by_script(jobs.values()).get(os.path.realpath(run.script), []):
        if job.state in {JobState.PENDING, JobState.RUNNING} and job.job_id not in old:
            if job.state is JobState.PENDING:
                # The earlier sbatch may have excluded other nodes. If Slurm refuses the change, the job keeps them.
                with contextlib.suppress(TorchrelayError):
                    slurm.update(job.job_id, ExcNodeList=",".join(excluded))
            return job.job_id
    environment = json.loads(run.environment.read_text()) if run.environment.exists() else None
    waits_for = dependency(run, spec, jobs)
    try:
        return submission.submit(run.script, excluded, environment, waits_for)
    except TorchrelayError as error:
        typed = bad_nodes.typed_exclude(spec)
        if excluded == typed or not submission.lacks_nodes(str(error)):
            raise
        return submission.submit(run.script, typed, environment, waits_for)
