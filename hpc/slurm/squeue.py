"""Parses the user's jobs in squeue: state, script, nodes, times, reason for pending. Pure; runs everywhere."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpc.run.causes import JobState
from hpc.run.rundir import RunDir

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


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Parse squeue's output in QUEUE_FORMAT, and return the jobs by id. Skips lines in any other form."""
    found = {}
    for line in text.split("\n"):
        words = line.split(_SEPARATOR, len(_FIELDS) - 1)
        # A line in another form is a warning, or the end of a command that contains a line break.
        if len(words) < len(_FIELDS) or not words[0][:1].isdecimal():
            continue
        job_id, state, reason, nodes, batch_host, restarts, eligible, started, command = words
        found[job_id] = SlurmJob(
            job_id=job_id, state=job_state(state), reason=reason, nodes=nodes, batch_host=batch_host,
            command=command.rstrip().removesuffix(_SEPARATOR),
            restarts=int(restarts) if restarts.isdigit() else 0,
            eligible=slurm_time(eligible), started=slurm_time(started),
        )  # fmt: skip
    return found


def slurm_time(text: str) -> float | None:
    """Convert a time that Slurm's commands print for us, in UTC, to seconds since the epoch; None for other words."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None  # N/A, Unknown


def jobs_by_script(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Return the jobs of runs, by the real path of the run's script, oldest first."""
    found: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        if job.command.rpartition("/")[2] == _SCRIPT:
            found.setdefault(os.path.realpath(job.command), []).append(job)
    return {script: sorted(alike, key=_number) for script, alike in found.items()}


def _number(job: SlurmJob) -> int:
    digits = job.job_id.partition("_")[0]
    return int(digits) if digits.isdigit() else 0


# The keys are beginnings of Slurm's reasons for a pending job: squeue(1), "JOB REASON CODES". Reasons with spaces are
# messages of slurmctld.
_REASONS = {
    "None": "",
    "WaitingForScheduling": "",
    "Priority": "jobs of higher priority come first",
    "Resources": "no nodes are free",
    "BeginTime": "held by Slurm (--begin, or a requeue delay, which hpc supervise ends)",
    "Cleaning": "Slurm is cleaning up after its last start",
    "Prolog": "Slurm is preparing its nodes",
    "Dependency": "it depends on another job",
    "DependencyNeverSatisfied": "it will never start: the job that it depends on failed",
    "JobHeldUser": "held by its user: type scontrol release",
    "JobHeldAdmin": "held by an administrator: ask why",
    "launch failed requeued held": "held after a failed start: type scontrol release",
    "job requeued in held state": "held after a requeue: type scontrol release",
    "JobLaunchFailure": "its start failed",
    "ReqNodeNotAvail, Reserved for maintenance": "a maintenance begins before its time limit (see --time-min)",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "Nodes required for job are DOWN": "nodes that it needs are down or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "it will never start: no node has what it asks for",
    "PartitionDown": "its partition starts no jobs",
    "PartitionInactive": "its partition starts no jobs",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "held because its reservation was removed: type hpc cancel, then hpc resume",
    "Licenses": "no licences are free",
    "QOSGrp": "the jobs of its QOS have reached a limit",
    "QOSMax": "you have reached a limit of the QOS, or this job alone exceeds it",
    "QOSMin": "it asks for less than its QOS requires",
    "AssocGrp": "the jobs of its account have reached a limit",
    "AssocMax": "you have reached a limit of the account, or this job alone exceeds it",
    "Association": "you have reached a limit of the account, or this job alone exceeds it",
    "InvalidAccount": "it will never start: its account is invalid",
    "InvalidQOS": "it will never start: its QOS is invalid",
    # This reason is ours: Slurm gives none for a suspended job.
    "suspended": "suspended: it continues when Slurm or an administrator resumes it",
}


def explain_reason(reason: str) -> str:
    """Return why a job is pending, in words; empty if Slurm has no reason yet. An unknown reason stays unchanged."""
    words = reason.replace("_", " ")
    known = max((beginning for beginning in _REASONS if words.startswith(beginning)), key=len, default=None)
    return reason if known is None else _REASONS[known]
