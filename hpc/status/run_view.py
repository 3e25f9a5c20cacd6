"""Makes summaries of runs, the entries of `hpc status --json`, from run directories and at most one call of squeue.

Runs on the login node. Reads only the ends of the metrics, so that long runs take no longer.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import last_json_line, number_in, storage_time
from hpc.base.kernel import is_alive
from hpc.run.causes import Cause, JobState
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History, State
from hpc.run.events.interruptions import goodput, interruptions_of, steps_lost, waits_of
from hpc.run.events.kinds import (
    Claimed,
    DataStaged,
    EnvironmentStaged,
    Event,
    NodeFailed,
    Preflight,
    RanksStarted,
    Resubmitted,
    Staging,
    Submitted,
    Submitting,
    TrainStarted,
)
from hpc.run.ownership import other_owner
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.notification.notices import unsent_messages
from hpc.services.tracking.sender import last_events
from hpc.slurm import client as slurm
from hpc.slurm import handover, squeue
from hpc.slurm.alive import jobs_by_run
from hpc.slurm.predecessors import predecessors_of
from hpc.slurm.squeue import SlurmJob, jobs_by_script
from hpc.status.log_reader import last_output, last_traceback
from hpc.status.summary import (
    TERMINAL,
    AttemptSummary,
    AwaitedRun,
    StagingProgress,
    Summary,
    TrackerState,
    UnsentMessage,
)
from hpc.status.warnings import unknown_restarts, warnings_of
from hpc.supervise.decide import NEVER_SUBMITTED, STARTS, Decision, decide
from hpc.supervise.observe import RunObservation, observe, with_final_states

_LITTLE_SPACE_BYTES = 2**16
# The age at which the queue is queried again: a query every second would load the controller.
_QUEUE_SECONDS = 5.0
# Errors of reading a run's files, which anybody may have written, even another user.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
# The age at which a failed query is repeated: while the controller is down, squeue takes half a minute to fail.
_AWAY_SECONDS = 30.0


def summarize(
    run: RunDir,
    jobs: Sequence[SlurmJob] | None,
    decision: Decision | None = None,
    queue: Mapping[str, SlurmJob] | None = None,
) -> Summary:
    """Return the summary of a run. Unknown values are None.

    `jobs` are the run's jobs in the queue (`jobs_by_run`), None if the queue is unknown. `decision` is what the
    supervisor would do about a run without jobs. `queue` has all jobs of the user, also of runs for which this run
    waits. A damaged directory raises no error, because that would hide the other runs.
    """
    try:
        history = History.load(run)
        damaged = list(history.damage)
        records = _Records(
            history=history,
            train=_numbers(last_json_line(run.train_metrics)),
            validation=_numbers(last_json_line(run.eval_metrics, lambda line: line.get("split") == "val")),
            counted=_numbers(last_json_line(run.counted_steps)),
            snapshot=_numbers(last_json_line(run.newest_snapshot)),
            result=_final_result(run, damaged),
            spec=_spec(run, damaged),
        )
        waits_for = _waits_for(run, records.spec, queue)
        return replace(_summary(run, jobs, decision, records), waits_for=waits_for, damaged=damaged)
    except _DAMAGE as error:
        damaged = [f"the records in {run.path} cannot be read: {type(error).__name__}: {error}"]
        return replace(_summary(run, jobs, decision, _Records()), damaged=damaged)


def _numbers(line: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return only the numbers of a line of metrics, which a user's script may have written."""
    return {name: value for name in line or {} if (value := number_in(line or {}, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class _Records:
    """The records in a run directory."""

    history: History = field(default_factory=History)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the last logged step."""
    validation: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the last validation."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the steps that the ranks of a script have counted."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the newest snapshot."""
    result: Mapping[str, Any] | None = None
    """The final result; empty if its file is damaged, None if the run has none yet."""
    spec: RunSpec | None = None
    """The spec; None if it is damaged."""


def _summary(run: RunDir, jobs: Sequence[SlurmJob] | None, decision: Decision | None, records: _Records) -> Summary:
    history, train, validation, final = records.history, records.train, records.validation, records.result or {}
    attempts, interruptions, best = history.attempts, interruptions_of(history), final.get("best")
    job = next(iter(jobs or ()), None)
    pending = job if job and job.state is JobState.PENDING else None
    suspended = "suspended" if job and job.state is JobState.SUSPENDED else None
    # The job still runs between the final model and the end of the attempt: `--wait` must not return yet.
    ending = bool(attempts) and attempts[-1].cause is None and (job is not None or _runs_here(history))
    state = decision.state if decision else _state(history, job, slurm_answers=jobs is not None)
    state = "completed" if records.result is not None and not ending else state
    reason = pending.reason if pending else suspended or (_reason(decision) if decision else None)
    if state == "failed" and job is None and history.last_job_id is None:
        reason = NEVER_SUBMITTED
    started, checked, ranks = history.last(TrainStarted), history.last(Preflight), history.last(RanksStarted)
    own_script = records.spec is not None and not records.spec.program.reports_steps
    warnings = warnings_of(history, completed=state == "completed")
    warnings += unknown_restarts(history, len(interruptions)) if own_script else []
    warnings += [] if state in TERMINAL else _full_storage(run)
    resubmitted, job_id = history.last(Resubmitted), job.job_id if job else history.last_job_id
    reports_nothing = own_script and bool(attempts) and "step" not in train
    return Summary(
        run=run.name,
        run_dir=str(run.path),
        job_id=job_id,
        state=state,
        attempt=attempts[-1].attempt if attempts else None,
        attempts=tuple(convert(attempt, AttemptSummary, from_attributes=True) for attempt in attempts),
        epoch=train.get("epoch"),
        step=train.get("step"),
        **_counted(records, attempts, is_over=state in TERMINAL),
        **_snapshot(records, attempts, is_over=state in TERMINAL),
        total_steps=started.total_steps if started else None,
        world_size=ranks.world_size if ranks else train.get("world_size"),
        device=checked.device if checked else None,
        images_per_second=train.get("images_per_second"),
        train_loss=train.get("loss"),
        val_accuracy=validation.get("accuracy"),
        test_accuracy=number_in(final, "test_accuracy"),
        best_test_accuracy=number_in(best, "test_accuracy") if isinstance(best, dict) else None,
        model=str(run.final_model) if records.result is not None and run.final_model.is_file() else None,
        steps_lost=steps_lost(interruptions) if attempts else None,
        **_allocation(attempts, records.spec),
        **_time_spent(records, attempts, is_over=state in TERMINAL),
        interruptions=tuple(interruptions),
        budget=history.budget.used,
        warnings=warnings,
        staging=_staging(history) if state == "running" else None,
        unsent=convert(unsent_messages(history), tuple[UnsentMessage, ...]),
        trackers=_trackers(history, records.spec),
        reason=reason,
        starts_at=(pending.eligible if pending.reason == "BeginTime" else pending.started) if pending else None,
        why_new_job=_why_new_job(resubmitted) if resubmitted and resubmitted.job_id == job_id else None,
        detail=attempts[-1].detail if attempts else None,
        traceback=last_traceback(run, history) if state == "failed" else None,
        last_output=last_output(run, attempts[-1].attempt) if reports_nothing else None,
        eta_seconds=_eta_seconds(started, train) if started and state == "running" else None,
        waits_for=(),
        damaged=(),
    )


def _full_storage(run: RunDir) -> list[str]:
    if shutil.disk_usage(run.path).free >= _LITTLE_SPACE_BYTES:
        return []
    return [f"no space is left for {run.path}: free some; a run that is starting waits for it, for up to an hour"]


def _waits_for(run: RunDir, spec: RunSpec | None, queue: Mapping[str, SlurmJob] | None) -> tuple[AwaitedRun, ...]:
    found = predecessors_of(run, spec, queue or {}) if spec else []
    return tuple(
        AwaitedRun(
            run=one.run.name,
            run_dir=str(one.run.path),
            until="completed" if one.must_complete else "ended",
            problem=None if queue is None else one.problem,
        )
        for one in found
        if not one.is_over
    )


def _allocation(attempts: Sequence[Attempt], spec: RunSpec | None) -> dict[str, Any]:
    """Return the partition and GPUs of the last attempt; before the first attempt, the most that the run asks for."""
    if spec is None:
        return dict.fromkeys(("partition", "gpus", "gpu_type"))
    nodes = len(attempts[-1].nodes) if attempts else spec.job_nodes.most
    resources, gpus = spec.resources, spec.resources.gpus_per_node
    return {"partition": resources.partition, "gpus": nodes * gpus.count, "gpu_type": gpus.kind}


def _time_spent(records: _Records, attempts: Sequence[Attempt], *, is_over: bool) -> dict[str, Any]:
    """Return the fields of a Summary about time. `elapsed_seconds` leaves out pauses that `hpc resume` ended."""
    history, spec, trained = records.history, records.spec, records.train.get("train_seconds")
    events = history.events
    last = attempts[-1].ended if attempts and attempts[-1].ended else events[-1].time if events else 0.0
    until = last if is_over else time.time()
    queued = sum(end - begin for begin, end in waits_of(history, until)) if events else None
    if not attempts:
        return {"elapsed_seconds": None, "queue_seconds": queued, "goodput": None, "gpu_hours": None}
    paused = sum(attempt.resumed - attempt.ended for attempt in attempts if attempt.resumed and attempt.ended)
    began = attempts[0].started + paused
    starts = history.of(TrainStarted)
    inherited = starts[0].train_seconds if starts else 0.0  # a fork inherits the seconds of its original
    hours = None
    if spec is not None and (gpus := spec.resources.gpus_per_node.count):
        node_seconds = sum(len(attempt.nodes) * ((attempt.ended or until) - attempt.started) for attempt in attempts)
        hours = max(0.0, node_seconds * gpus / 3600)
    return {
        "elapsed_seconds": max(0.0, until - began),
        "queue_seconds": queued,
        "goodput": goodput(None if trained is None else trained - inherited, began, until),
        "gpu_hours": hours,
    }


def _counted(records: _Records, attempts: Sequence[Attempt], *, is_over: bool) -> dict[str, Any]:
    """Return the fields of a Summary about the steps that a script counts; they are None if it reports its steps."""
    last, counted = attempts[-1] if attempts else None, records.counted
    if last is None or "step" in records.train or records.history.knows_steps:
        return {"counted_steps": None, "steps_per_second": None}
    if last.cause is not None:
        return {"counted_steps": last.counted_steps, "steps_per_second": None}
    is_now = counted.get("attempt") == last.attempt and not is_over
    pace = counted.get("step_seconds") if is_now else None
    return {"counted_steps": counted.get("steps") if is_now else None, "steps_per_second": 1 / pace if pace else None}


def _snapshot(records: _Records, attempts: Sequence[Attempt], *, is_over: bool) -> dict[str, Any]:
    """Return the fields of a Summary about the newest snapshot; they are None if the attempt has ended."""
    newest = records.snapshot
    if is_over or not attempts or attempts[-1].cause is not None or newest.get("time", 0.0) < attempts[-1].started:
        return {"snapshot_seconds": None, "snapshot_bytes": None}
    return {"snapshot_seconds": max(0.0, time.time() - newest["time"]), "snapshot_bytes": newest.get("node_bytes")}


def _why_new_job(resubmitted: Resubmitted) -> str | None:
    if resubmitted.detail is None or resubmitted.old_job_id is None:
        return None
    return f"job {resubmitted.old_job_id} was not requeued: {resubmitted.detail}"


def _reason(decision: Decision) -> str | None:
    """Return why a run has no job, and what to type; None if the reason only repeats the run's state."""
    advice = ": continue it with hpc supervise --once, or hpc resume" if decision.action in STARTS else ""
    return None if decision.reason == decision.state else decision.reason + advice


def _state(history: History, job: SlurmJob | None, *, slurm_answers: bool) -> State:
    last = history.last_attempt if history.last_attempt and not history.last_attempt.resumed else None
    cause = last.cause if last else None
    not_ended = last is not None and cause is None
    if cause == Cause.COMPLETED:
        return "completed"
    if history.is_cancelled:
        return "cancelled"
    if any(event.cluster == "local" for event in history.events if isinstance(event, Submitting | Submitted)):
        if alive := _local_state(history):
            return alive
    elif job is not None and job.state is not JobState.UNKNOWN:
        return "running" if job.state is JobState.RUNNING else "pending"
    elif (job is not None or not slurm_answers) and (not_ended or history.may_restart):
        return "running" if not_ended else "pending"
    return history.outcome or "failed"


def _local_state(history: History) -> State | None:
    """Return `running` for a run on this machine, or `pending` while it is being submitted; None if it is neither."""
    if _runs_here(history):
        return "running"
    return "pending" if time.time() < handover.handover_deadline(history.unfinished_handover(0)) else None


def _runs_here(history: History) -> bool:
    """Return whether the process that controls a run with --cluster local is alive on this machine; False on Slurm."""
    return any(event.started and is_alive(event.job_id, event.started) for event in history.of(Submitted))


def _staging(history: History) -> StagingProgress | None:
    """Return the progress of the slowest node that stages data; None if no node does."""
    last: dict[str, Event] = {}
    for event in history.events:
        if isinstance(event, Claimed):
            last = {}
        elif isinstance(event, Staging | DataStaged | EnvironmentStaged | NodeFailed):
            last[event.node] = event
    copying = [event for event in last.values() if isinstance(event, Staging)]
    if not copying:
        return None
    slowest = max(copying, key=lambda event: event.eta_seconds or 0.0)
    return convert(slowest, StagingProgress, from_attributes=True)


def _spec(run: RunDir, damaged: list[str]) -> RunSpec | None:
    try:
        return RunSpec.load(run)
    except UserError as error:
        damaged.append(str(error))
        return None


def _trackers(history: History, spec: RunSpec | None) -> tuple[TrackerState, ...]:
    """Return the trackers of the run, and why a node of the last attempt could not send to them."""
    last = last_events(history, history.last_attempt.attempt) if history.last_attempt else {}
    return tuple(
        TrackerState(
            tracker=service,
            url=getattr(last.get(service), "url", None),
            problem=getattr(last.get(service), "reason", None),
        )
        for service in (spec.tracker if spec else ())
    )


def _final_result(run: RunDir, damaged: list[str]) -> dict[str, Any] | None:
    try:
        result = json.loads(run.final_result.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        result = None
    if isinstance(result, dict):
        return result
    damaged.append(f"{run.final_result} is damaged: it is not a JSON object")
    return {}  # the run is complete, because the file exists


def _eta_seconds(started: TrainStarted, train: Mapping[str, Any]) -> float | None:
    """Return the seconds of training left, at the pace since the ranks last started; None if unknown."""
    total, step, at = started.total_steps, train.get("step"), train.get("time")
    if total is None or step is None or at is None or step <= started.step:
        return None
    pace = (at - started.time) / (step - started.step)
    return float(max(0.0, (total - step) * pace))


def _decisions(runs: Sequence[RunDir], jobs: Mapping[str, SlurmJob] | None) -> dict[Path, Decision]:
    """Return the supervisor's decision on each unfinished Slurm run. `runs` have no job. Empty if `jobs` is None."""
    found, scripts = list[RunObservation](), jobs_by_script(jobs.values() if jobs else ())
    queued = [run for run in runs if jobs is not None and run.script.exists() and not run.final_result.exists()]
    clocks = {parent: storage_time(parent) for parent in {run.path.parent for run in queued}}
    for run in queued:
        # A damaged run, or one that was deleted meanwhile, gets no decision.
        with contextlib.suppress(*_DAMAGE):
            found.append(observe(run, scripts, clocks[run.path.parent]))
    return {one.run.path: decide(one) for one in with_final_states(found)}


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


@dataclass
class StatusCache:
    """Makes summaries of runs. It caches the summaries of ended runs and, for some seconds, the queue."""

    problem: str | None = None
    """Sentence that says why the last summaries lack the queue; None if Slurm answered or was not asked."""
    _jobs: Mapping[str, SlurmJob] | None = None
    _queried: float | None = None
    _decisions: dict[Path, Decision] = field(default_factory=dict)
    """Decisions of the supervisor, cached as long as `_jobs`, because they need sacct."""
    _ended: dict[Path, tuple[int, Summary]] = field(default_factory=dict)

    def summaries(self, runs: Sequence[RunDir]) -> list[Summary]:
        """Return one summary per run, and none for a deleted run."""
        jobs = self.queue(runs)
        # squeue lists only the user's jobs, so only the directory tells the state of another user's run.
        others = {run.path: owner for run in runs if (owner := other_owner(run.path)) is not None}
        mine = [run for run in runs if run.path not in others]
        own = jobs_by_run(mine, jobs) if jobs is not None else {}
        # A process that resumes or ends a run adds a file to the directory of events, whose time then changes.
        stamps = {run.path: _modified_ns(run.events) for run in runs}
        ended = {
            path: row for path, (stamp, row) in self._ended.items() if stamp == stamps.get(path) and not own.get(path)
        }
        known = {*ended, *self._decisions, *(path for path, listed in own.items() if listed)}
        self._decisions |= _decisions([run for run in mine if run.path not in known], jobs)
        rows = list[Summary]()
        for run in runs:
            row = ended.get(run.path)
            if row is None:
                row = summarize(run, own.get(run.path), self._decisions.get(run.path), jobs)
                if run.path in others:
                    note = f"it belongs to {others[run.path]}, so this is only what its directory says"
                    row = replace(row, warnings=[note, *row.warnings])
            stamp = stamps[run.path]
            # While a message is being sent, the run is not cached: the result of the message does not change the stamp.
            is_sending = any(message.problem is None for message in row.unsent)
            if stamp is not None and row.state in TERMINAL and not is_sending:
                self._ended[run.path] = stamp, row
            if stamp is not None or run.spec.exists():
                rows.append(row)
        return rows

    def summary(self, run: RunDir) -> Summary:
        """Return the summary of a single run. Raises TorchrelayError if it was deleted."""
        rows = self.summaries([run])
        if not rows:
            raise TorchrelayError(f"run {run.name} was deleted: {run.spec} does not exist")
        return rows[0]

    def queue(self, runs: Sequence[RunDir]) -> Mapping[str, SlurmJob] | None:
        """Return the user's jobs; None if no run was submitted to Slurm, or Slurm is missing or does not answer."""
        max_age = _AWAY_SECONDS if self.problem else _QUEUE_SECONDS
        if self._queried is not None and time.monotonic() - self._queried <= max_age:
            return self._jobs
        self._jobs, self.problem, self._decisions = None, None, {}
        # A run without a script was not submitted to Slurm.
        if any(run.script.exists() for run in runs) and slurm.why_unavailable() is None:
            try:
                self._jobs = squeue.jobs()
            except TorchrelayError as error:
                self.problem = f"Slurm does not answer, so this is what the run directories record: {error}"
        self._queried = time.monotonic()
        return self._jobs
