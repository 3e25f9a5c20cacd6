"""A job as squeue tells of it: its state, whose it is, why it waits, and when it may start. Runs everywhere."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc.core.outcome import JobState
from hpc.core.rundir import RunDir

_SEPARATOR = "|"
# `--format` of one letter each has no count of restarts. The last one may hold anything.
_FIELDS = ("JobID", "State", "Reason", "NodeList", "RestartCnt", "EligibleTime", "StartTime", "Command")
QUEUE_FORMAT = ",".join(f"{field}:{_SEPARATOR}" for field in _FIELDS)
_SCRIPT = RunDir(Path()).script.name


_STATES = {
    "PENDING": JobState.PENDING, "CONFIGURING": JobState.PENDING, "REQUEUED": JobState.PENDING,
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
    """Our word for Slurm's; a word that we do not know is UNKNOWN."""
    return _STATES.get(word.partition(" ")[0].rstrip("+"), JobState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One of the user's jobs, as a line of squeue tells it."""

    job_id: str
    state: JobState
    reason: str
    nodes: str
    command: str
    """The script: for a run, its submit.sbatch, whoever submitted it."""
    restarts: int = 0
    """How often Slurm has requeued it."""
    eligible: float | None = None
    """When it may start, if there is room; in seconds since the epoch, like the next one."""
    started: float | None = None
    """When it started; while it waits, when Slurm thinks that it will."""


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Parse what squeue prints of `_FIELDS`. A line of something else is not a job."""
    found = {}
    for line in text.split("\n"):
        words = line.split(_SEPARATOR, len(_FIELDS) - 1)
        # The rest of a command with a line break in it, or a warning.
        if len(words) < len(_FIELDS) or not words[0][:1].isdecimal():
            continue
        job_id, state, reason, nodes, restarts, eligible, started, command = words
        found[job_id] = SlurmJob(
            job_id=job_id, state=job_state(state), reason=reason, nodes=nodes,
            command=command.rstrip().removesuffix(_SEPARATOR),
            restarts=int(restarts) if restarts.isdigit() else 0,
            eligible=_seconds(eligible), started=_seconds(started),
        )  # fmt: skip
    return found


def _seconds(time: str) -> float | None:
    """A time of Slurm's, which is ISO 8601 without a zone: that of the machine. None where there is none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None  # N/A, Unknown


def jobs_by_script(jobs: Iterable[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """The jobs of each script of a run, by its real path, the oldest first; one index for all runs."""
    found: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        if job.command.rpartition("/")[2] == _SCRIPT:
            found.setdefault(os.path.realpath(job.command), []).append(job)
    return {script: sorted(alike, key=_number) for script, alike in found.items()}


def _number(job: SlurmJob) -> int:
    digits = job.job_id.partition("_")[0]
    return int(digits) if digits.isdigit() else 0


# Why a job waits, by how Slurm's word or sentence for it begins. The man page of squeue tells more, under "JOB REASON
# CODES"; words with spaces are what slurmctld writes about one job.
_REASONS = {
    "None": "",
    "WaitingForScheduling": "",
    "Priority": "jobs of higher priority come first",
    "Resources": "no nodes are free",
    "BeginTime": "held by Slurm (requeue delay or --begin)",
    "Cleaning": "its last start is being cleaned up",
    "Prolog": "its nodes are being prepared",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "it will never start: the job that it depends on has failed",
    "JobHeldUser": "held by its user: `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator: ask why",
    "launch failed requeued held": "held, because it could not be started: `scontrol release` lets it go",
    "job requeued in held state": "held after a requeue: `scontrol release` lets it go",
    "JobLaunchFailure": "it could not be started",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "Nodes required for job are DOWN": "nodes that it needs are down or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "it will never start: no node has what it asks for",
    "PartitionDown": "its partition starts no jobs",
    "PartitionInactive": "its partition starts no jobs",
    "PartitionNodeLimit": "its partition gives no job so many nodes",
    "PartitionTimeLimit": "its partition gives no job so much time",
    "Reservation": "its reservation has not begun",
    "Licenses": "no licences are free",
    "QOSGrp": "all jobs of its quality of service have reached a limit",
    "QOSMax": "its user has reached a limit of the quality of service",
    "QOSMin": "it asks for less than its quality of service demands",
    "AssocGrp": "all jobs of its account have reached a limit",
    "AssocMax": "its user has reached a limit of the account",
    "Association": "its user has reached a limit of the account",
    "InvalidAccount": "it will never start: its account is not valid",
    "InvalidQOS": "it will never start: its quality of service is not valid",
}


def explain_reason(reason: str) -> str:
    """Why a job waits, in words; what we do not know stays as Slurm says it, and what it has not said yet is empty."""
    said = reason.replace("_", " ")
    known = max((word for word in _REASONS if said.startswith(word)), key=len, default=None)
    return reason if known is None else _REASONS[known]
