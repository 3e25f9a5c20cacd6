"""Runs squeue, and sacct: the user's jobs with state, script, nodes, times and reason for pending. Runs everywhere.

Only `final_states` needs Slurm's accounting.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpc.run.causes import JobState
from hpc.run.rundir import RunDir
from hpc.slurm import client

_SEPARATOR = "|"
# Fields for `--Format`, because `--format` has no count of restarts. The last field may hold any characters.
_FIELDS = ("JobID", "State", "Reason", "NodeList", "BatchHost", "RestartCnt", "EligibleTime", "StartTime", "Command")
QUEUE_FORMAT = ",".join(f"{field}:{_SEPARATOR}" for field in _FIELDS)
_SCRIPT = RunDir(Path()).script.name
_STATES = {
    "PENDING": JobState.PENDING, "CONFIGURING": JobState.PENDING, "REQUEUED": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,  # since 25.11: a node failed, and Slurm keeps the others for the job
    "REQUEUE_FED": JobState.PENDING, "REQUEUE_HOLD": JobState.PENDING, "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING, "LAUNCH_FAILED": JobState.PENDING, "RECONFIG_FAIL": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING, "RUNNING": JobState.RUNNING, "SUSPENDED": JobState.SUSPENDED,
    "RESIZING": JobState.RUNNING, "SIGNALING": JobState.RUNNING, "STOPPED": JobState.SUSPENDED,
    "COMPLETING": JobState.ENDING, "STAGE_OUT": JobState.ENDING, "CANCELLED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED, "NODE_FAIL": JobState.NODE_FAIL, "BOOT_FAIL": JobState.NODE_FAIL,
    "COMPLETED": JobState.COMPLETED, "FAILED": JobState.FAILED, "OUT_OF_MEMORY": JobState.FAILED,
}  # fmt: skip


def job_state(word: str) -> JobState:
    """Return the state that a word of Slurm means; UNKNOWN for an unknown word."""
    return _STATES.get(word.partition(" ")[0].rstrip("+"), JobState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One of the user's jobs: a line of squeue."""

    job_id: str
    state: JobState
    reason: str
    nodes: str
    command: str
    """Path of the job's script, which is submit.sbatch for a job of a run."""
    batch_host: str = ""
    """Node on which the job's script was started. A job with --no-kill may have lost this node since."""
    restarts: int = 0
    """Number of times that Slurm has requeued the job."""
    eligible: float | None = None
    """Earliest start in seconds since the epoch; None if unknown."""
    started: float | None = None
    """Start in seconds since the epoch; for a pending job, the expected start; None if unknown."""


def jobs() -> dict[str, SlurmJob]:
    """Return all jobs of the user in squeue, by id. Slurm remembers ended jobs for a while (MinJobAge)."""
    # --all also shows jobs in partitions that are hidden, or that the user may no longer use.
    return parse_jobs(client.run("squeue", "--me", "--all", "--states=all", "--noheader", f"--Format={QUEUE_FORMAT}"))


def dependencies() -> dict[str, str]:
    """Return the dependencies of the user's pending jobs, such as `afterok:12,afterany:13`, by job id."""
    text = client.run("squeue", "--me", "--all", "--states=pending", "--noheader", "--format=%i|%E")
    rows = (line.partition("|") for line in text.splitlines())
    # squeue adds a state to each condition: afterok:12(unfulfilled).
    return {job_id: re.sub(r"\(\w+\)", "", waits_for) for job_id, _, waits_for in rows if ":" in waits_for}


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Parse squeue's output in QUEUE_FORMAT, and return the jobs by id. Skips lines in any other form."""
    listed = {}
    for line in text.split("\n"):
        words = line.split(_SEPARATOR, len(_FIELDS) - 1)
        # A line in another form is a warning, or the end of a command that contains a line break.
        if len(words) < len(_FIELDS) or not words[0][:1].isdecimal():
            continue
        job_id, state, reason, nodes, batch_host, restarts, eligible, started, command = words
        listed[job_id] = SlurmJob(
            job_id=job_id, state=job_state(state), reason=reason, nodes=nodes, batch_host=batch_host,
            command=command.rstrip().removesuffix(_SEPARATOR),
            restarts=int(restarts) if restarts.isdigit() else 0,
            eligible=slurm_time(eligible), started=slurm_time(started),
        )  # fmt: skip
    return listed


def slurm_time(text: str) -> float | None:
    """Convert a time that Slurm's commands print for us, in UTC, to seconds since the epoch; None for other words."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None  # N/A, Unknown


def jobs_by_script(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Return the jobs of runs, by the real path of the run's script, oldest first."""
    by_script: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        if job.command.rpartition("/")[2] == _SCRIPT:
            by_script.setdefault(os.path.realpath(job.command), []).append(job)
    return {script: sorted(alike, key=_number) for script, alike in by_script.items()}


def _number(job: SlurmJob) -> int:
    digits = job.job_id.partition("_")[0]
    return int(digits) if digits.isdigit() else 0


def has_queue(partition: str | None) -> bool:
    """Return whether jobs wait for nodes of a partition; None is any partition. Other users' jobs may be hidden."""
    options = [f"--partition={partition}"] if partition else []
    return not {"Resources", "Priority"}.isdisjoint(
        client.run("squeue", *options, "--states=pending", "--noheader", "--format=%r").split()
    )


def lacks_first_node(job: SlurmJob) -> bool:
    """Return whether a running job has lost the node of its batch script. With --no-kill, it keeps its other nodes."""
    return job.state is JobState.RUNNING and job.batch_host not in client.hostnames(job.nodes)


def final_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs, by id, from Slurm's accounting, which may lack some of the jobs.

    Raises TorchrelayError if the cluster has no accounting, or if the accounting does not answer.
    """
    options = ("--allocations", "--noheader", "--parsable2", "--format=JobIDRaw,State", f"--jobs={','.join(job_ids)}")
    rows = (line.split("|") for line in client.run("sacct", *options).splitlines())
    return {row[0]: job_state(row[1]) for row in rows if len(row) == 2}


# The keys are beginnings of Slurm's reasons for a pending job: squeue(1), "JOB REASON CODES". Reasons with spaces are
# messages of slurmctld. Reasons that explain themselves, such as PartitionDown and InvalidAccount, are left out.
_REASONS = {
    "None": "",
    "WaitingForScheduling": "",
    "Priority": "jobs of higher priority come first",
    "Resources": "no nodes are free",
    "BeginTime": "held by Slurm (--begin, or a requeue delay, which hpc supervise ends)",
    "Dependency": "it depends on another job",
    "DependencyNeverSatisfied": "it will never start: the job that it depends on failed",
    "JobHeldUser": "held by its user: type scontrol release",
    "JobHeldAdmin": "held by an administrator: ask why",
    "launch failed requeued held": "held after a failed start: type scontrol release",
    "job requeued in held state": "held after a requeue: type scontrol release",
    "ReqNodeNotAvail, Reserved for maintenance": "a maintenance begins before its time limit (see --time-min)",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "BadConstraints": "it will never start: no node has what it asks for",
    "ReservationDeleted": "held because its reservation was removed: type hpc cancel, then hpc resume",
    "QOSGrp": "the jobs of its QOS have reached a limit",
    "QOSMax": "you have reached a limit of the QOS, or this job alone exceeds it",
    "QOSMin": "it asks for less than its QOS requires",
    "AssocGrp": "the jobs of its account have reached a limit",
    "AssocMax": "you have reached a limit of the account, or this job alone exceeds it",
    "Association": "you have reached a limit of the account, or this job alone exceeds it",
    # This reason is ours: Slurm gives none for a suspended job.
    "suspended": "suspended: it continues when Slurm or an administrator resumes it",
}


def explain_reason(reason: str) -> str:
    """Return why a job is pending, in words; empty if Slurm has no reason yet. An unknown reason stays unchanged."""
    words = reason.replace("_", " ")
    longest = max((beginning for beginning in _REASONS if words.startswith(beginning)), key=len, default=None)
    return reason if longest is None else _REASONS[longest]
