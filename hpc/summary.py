"""One run at a glance: the contract's `status --json` entry, from the run directory and what squeue said.

Runs on the login node. Reads the tails of files, so it is quick for long runs.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpc import ledger
from hpc.accounting import goodput, incidents_of, recovery_by_cause
from hpc.advice import warnings_of
from hpc.attempts import Attempt, attempts_of
from hpc.files import last_json_line, read_json_lines
from hpc.ledger import Event
from hpc.outcome import ENDS, Cause
from hpc.processes import is_alive
from hpc.rundir import RunDir
from hpc.slurm import Job, JobState

Summary = dict[str, Any]
TERMINAL = frozenset({"completed", "failed", "cancelled"})


def summarize(run: RunDir, jobs: Mapping[str, Job] | None) -> Summary:
    """Everything that is known of a run; None for what is not. `jobs` is None when Slurm does not answer."""
    events = ledger.read(run.events)
    attempts = attempts_of(events)
    incidents = incidents_of(events)
    job = next(iter(jobs_of(run, jobs or {})), None)
    train = last_json_line(run.train_metrics) or {}
    result = _final_result(run)
    state = state_of(run, events, attempts, job, slurm_answers=jobs is not None)
    started = [event for event in events if event["event"] == "train_started"]
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "job_id": job.job_id if job else _last_job_id(events),
        "state": state,
        "attempt": attempts[-1].attempt if attempts else None,
        "attempts": [_attempt(attempt) for attempt in attempts],
        "epoch": train.get("epoch"),
        "step": train.get("step"),
        "total_steps": started[-1].get("total_steps") if started else None,
        "world_size": train.get("world_size"),
        "images_per_second": train.get("images_per_second"),
        "train_loss": train.get("loss"),
        "val_accuracy": _validation(run),
        "test_accuracy": result.get("test_accuracy"),
        "steps_lost": sum(incident.steps_lost for incident in incidents) if attempts else None,
        "goodput": _goodput(events, attempts, train, state),
        "incidents": [asdict(incident) for incident in incidents],
        "recovery": recovery_by_cause(incidents),
        "warnings": warnings_of(events),
        "reason": job.reason if job and job.state is JobState.PENDING else None,
        "detail": attempts[-1].detail if attempts else None,
        "eta_seconds": _eta_seconds(started[-1], train) if started and state == "running" else None,
    }


def jobs_of(run: RunDir, jobs: Mapping[str, Job]) -> list[Job]:
    """The run's jobs in the queue, also those that were submitted by hand; one that runs comes first."""
    script = os.path.realpath(run.script)
    alive = [job for job in jobs.values() if job.state.alive and os.path.realpath(job.command) == script]
    return sorted(alive, key=lambda job: job.state is not JobState.RUNNING)


def _last_job_id(events: list[Event]) -> str | None:
    ids = [event["job_id"] for event in events if event["event"] in {"submitted", "claimed"}]
    return ids[-1] if ids else None


def state_of(run: RunDir, events: list[Event], attempts: list[Attempt], job: Job | None, *, slurm_answers: bool) -> str:
    """One of pending, running, completed, failed, cancelled."""
    causes = [attempt.cause for attempt in attempts]
    # Between the final model and the agent's last word the job still runs: whoever waits would look too early.
    last_word_due = causes[-1:] == [None] and job is not None and job.state.alive
    if causes[-1:] == [Cause.COMPLETED] or (run.final_result.exists() and not last_word_due):
        return "completed"
    if any(event["event"] == "cancelled" for event in events):
        return "cancelled"
    local = any(event.get("cluster") == "local" for event in events)
    if local:
        if any(is_alive(event["job_id"], event["started"]) for event in events if event["event"] == "submitted"):
            return "running"
    elif job is not None and job.state.alive:
        return "running" if job.state is JobState.RUNNING else "pending"
    elif not slurm_answers and not (causes and causes[-1] in ENDS):
        return "running" if causes[-1:] == [None] else "pending"
    return "cancelled" if causes[-1:] == [Cause.CANCELLED] else "failed"


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "job_id": attempt.job_id,
        "nodes": list(attempt.nodes),
        "members": list(attempt.members),
        "started": attempt.started,
        "ended": attempt.ended,
        "cause": attempt.cause,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "detail": attempt.detail,
    }


def _final_result(run: RunDir) -> dict[str, Any]:
    try:
        result = json.loads(run.final_result.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _validation(run: RunDir) -> float | None:
    accuracies = [line["accuracy"] for line in read_json_lines(run.eval_metrics) if line.get("split") == "val"]
    return accuracies[-1] if accuracies else None


def _goodput(events: list[Event], attempts: list[Attempt], train: Mapping[str, Any], state: str) -> float | None:
    if not attempts:
        return None
    ended = attempts[-1].ended or events[-1]["time"]
    return goodput(train.get("train_seconds"), attempts[0].started, ended if state in TERMINAL else time.time())


def _eta_seconds(started: Event, train: Mapping[str, Any]) -> float | None:
    """Seconds of training left, at the pace since the ranks last started."""
    total, step = started.get("total_steps"), train.get("step")
    if total is None or step is None or step <= started["step"]:
        return None
    pace = (train["time"] - started["time"]) / (step - started["step"])
    return float(max(0.0, (total - step) * pace))
