"""Events as `hpc submit`, the agents and rank 0 write them, and run directories whose ledgers have them.

Each function returns an event with all fields that its kind must have (`hpc/run/events/kinds.py`). `at` is its time in
seconds since the epoch, by default now.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpc.base import program
from hpc.base.files import append_line, json_line
from hpc.run.events import ledger
from hpc.run.events.kinds import Event
from hpc.run.rundir import RunDir
from hpc.run.spec import Recovery, Resources, RunSpec
from hpc.run.spec_file import script_program
from jobs.node_attempt import NodeAttempt
from training.config.classifier_program import ClassifierFlags
from training.config.train_config import TrainConfig


def event(kind: str, at: float | None = None, **fields: Any) -> Event:
    """Return an event of a kind that has no function of its own here, with these fields, as it is read from a file."""
    return typed({"time": time.time() if at is None else at, "event": kind, **fields})


def typed(record: Mapping[str, Any]) -> Event:
    """Return the event that a line with these fields is; without a time, one of long ago."""
    return ledger.decoded(json_line({"time": 0.001, **record}).encode())


def record_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event, also those that its file leaves out because they have their defaults."""
    return {"event": event.kind, **json.loads(json.dumps(msgspec.structs.asdict(event)))}


def records_in(events: Path) -> list[dict[str, Any]]:
    """Return the fields of all events in this directory, in the order of their times."""
    return [record_of(each) for each in ledger.read(events)]


def assert_typed(events: Path) -> set[str]:
    """Check that each line of a ledger is an event of its kind with no other field. Return the kinds.

    Ranks in a user's Python write plain dicts. A reader leaves out fields that it does not know.
    """
    records = [json.loads(line) for path in events.glob("*.jsonl") for line in path.read_text().splitlines()]
    for record in records:
        unknown = record.keys() - record_of(ledger.decoded(json.dumps(record).encode())).keys()
        assert not unknown, f"{record['event']} has no field {unknown}"
    return {record["event"] for record in records}


def recorded(node: NodeAttempt, kind: str) -> list[dict[str, Any]]:
    """Return the fields of the events of one kind that the agents of an attempt have written."""
    return [record_of(each) for each in node.history().during(node.attempt.attempt).events if each.kind == kind]


def submitted(
    at: float | None = None, *, job_id: str = "7", cluster: str = "slurm", started: int | None = None, **more: Any
) -> Event:
    """Return the submission of the first job."""
    return event("submitted", at, job_id=job_id, cluster=cluster, started=started, **more)


def claimed(
    at: float | None = None,
    attempt: int = 1,
    *,
    job_id: str = "7",
    restart: int = 0,
    secret: str = "n",
    port: int = 1,
    nodes: Sequence[str] = ("gpu01",),
) -> Event:
    """Return the beginning of an attempt."""
    job = {"job_id": job_id, "restart": restart, "secret": secret, "port": port, "nodes": list(nodes)}
    return event("claimed", at, attempt=attempt, **job)


def joined(at: float | None = None, attempt: int = 1, *, node: str = "gpu01", node_rank: int = 0) -> Event:
    """Return the beginning of an attempt on one of its nodes."""
    return event("joined", at, attempt=attempt, node=node, node_rank=node_rank)


def staged(
    at: float | None = None,
    attempt: int = 1,
    *,
    node: str = "gpu01",
    source: str = "/d",
    in_place: str | None = None,
    **more: Any,
) -> Event:
    """Return the end of a node's copying; with `in_place`, why it reads the data where they are."""
    return event("staged", at, attempt=attempt, node=node, source=source, in_place=in_place, **more)


def train_started(
    at: float | None = None,
    step: int = 0,
    *,
    attempt: int = 1,
    world_size: int = 1,
    total_steps: int | None = None,
    **seconds: float,
) -> Event:
    """Return a start of the ranks, which have restored a step."""
    known = {"step": step, "world_size": world_size, "total_steps": total_steps}
    return event("train_started", at, attempt=attempt, **known, **seconds)


def ranks_started(at: float | None = None, *, attempt: int = 1, world_size: int = 2, **more: Any) -> Event:
    """Return a start of all ranks of the first round."""
    return event("ranks_started", at, attempt=attempt, **{"round": 1, "world_size": world_size, **more})


def first_step(at: float | None = None, step: int = 1, *, attempt: int = 1) -> Event:
    """Return the first step after a start of the ranks."""
    return event("first_step", at, attempt=attempt, step=step)


def train_stopped(
    at: float | None = None, step: int = 5, *, attempt: int = 1, signal: str = "SIGTERM", seconds: float = 1.0
) -> Event:
    """Return a stop on request, whose step took some seconds to save."""
    return event("train_stopped", at, attempt=attempt, step=step, signal=signal, seconds=seconds)


def interruption(
    at: float | None = None,
    cause: str = "crashed",
    *,
    attempt: int = 1,
    step: int | None = 5,
    failed_at: float | None = None,
    **more: Any,
) -> Event:
    """Return a failure that the attempt survived."""
    return event("interruption", at, attempt=attempt, cause=cause, step=step, failed_at=failed_at, **more)


def rank_failed(
    at: float | None = None,
    rank: int = 0,
    *,
    attempt: int = 1,
    round_: int = 1,
    failed_at: float = 1.0,
    cause: str = "crashed",
    **more: Any,
) -> Event:
    """Return the failure of one rank, as the agent of its node saw it."""
    ended = {"exit_code": 1, "signal": None, "cause": cause}
    return event("rank_failed", at, attempt=attempt, round=round_, rank=rank, failed_at=failed_at, **ended, **more)


def attempt_ended(
    at: float | None = None, cause: str = "completed", *, attempt: int = 1, step: int | None = 5, **more: Any
) -> Event:
    """Return the end of an attempt."""
    return event("attempt_ended", at, attempt=attempt, cause=cause, step=step, **more)


def resubmitted(
    at: float | None = None, job_id: str = "8", *, attempt: int = 1, old_job_id: str = "7", excluded: Sequence[str] = ()
) -> Event:
    """Return the submission of another job for the same run."""
    return event("resubmitted", at, attempt=attempt, job_id=job_id, old_job_id=old_job_id, excluded=list(excluded))


def resumed(
    at: float | None = None, *, attempt: int = 1, number: int = 1, cancellations: int = 0, **more: Any
) -> Event:
    """Return the user's resumption, after which as many cancellations no longer count."""
    return event("resumed", at, attempt=attempt, number=number, cancellations=cancellations, **more)


def cancelled(at: float | None = None, *, final: bool = False) -> Event:
    """Return the user's cancellation."""
    return event("cancelled", at, final=final)


def of_message(
    kind: str, at: float | None = None, *, notice: str = "failed-001", recipient: str = "hook", **more: Any
) -> Event:
    """Return an event of a message: notifying, notification_sent or notification_failed."""
    return event(kind, at, notice=notice, recipient=recipient, **more)


def write_events(run: RunDir, *events: Event, file: str = "x.jsonl") -> None:
    """Append events to a file of a run's ledger; each of them has to be one that `hpc` reads."""
    run.events.mkdir(parents=True, exist_ok=True)
    for each in events:
        append_line(run.events / file, ledger.line_of(each))
    damaged = [line for line in ledger.read_with_damage(run.events)[1] if f"/{file} is damaged" in line]
    assert not damaged


def script_spec(*script: str, **settings: Any) -> RunSpec:
    """Return the spec of a user's script on a cluster, with these settings."""
    usual = {"name": "r", "cluster": "slurm", "data": None, "stage_dir": "/tmp", "resources": Resources()}
    return RunSpec(**{**usual, "program": script_program(script or ("a.py",)), **settings})


def resources_of(**typed: Any) -> Resources:
    """Return the resources of these flags, with values as a user types them."""
    return program.build(Resources, {name.replace("_", "-"): value for name, value in typed.items()})


def recovery_of(**typed: Any) -> Recovery:
    """Return the recovery of these flags, with values as a user types them."""
    return program.build(Recovery, {name.replace("_", "-"): value for name, value in typed.items()})


def of_training(train: TrainConfig, **more: Any) -> dict[str, Any]:
    """Return the settings of a spec that make it a training's."""
    return {"program": ClassifierFlags(train=train, **more).as_program()}


def recorded_run(path: Path, *events: Event, **settings: Any) -> RunDir:
    """Make the directory of a user's script whose ledger has these events; the settings are those of its spec."""
    run = RunDir(path)
    write_events(run, *events)
    script_spec(*settings.pop("script", ()), **{"name": run.name, **settings}).save(run)
    return run
