"""The ledger: what happened to a run, as JSON lines, one file per writer. Runs everywhere.

One writer per file, because appends by several hosts tear on NFS. Every record has `time` (seconds since the epoch) and
`event`; all but submitting, submitted, refused, deferred, cancelled and those of messages have `attempt`. The events
and their other fields (a failure has those that are known):

| event | by | fields |
|---|---|---|
| submitting | submit, in a new run directory, before it submits the first job | cluster host pid started |
| submitted | submit; without Slurm, the process that starts the controller, for resume too | job_id cluster started \
  stop_lead_seconds grace_seconds (on preemption; null if unknown) |
| claimed | head node's agent | job_id restart secret port addresses nodes |
| refused | head node's agent | job_id restart detail |
| deferred | head node's agent: the run waits for others, so this start of the job makes no attempt | job_id restart \
  detail |
| joined | every agent | node node_rank clock_skew_seconds tmp_free_bytes shm_free_bytes |
| staging | an agent with a long copy | node source activity bytes_done bytes_total bytes_per_second eta_seconds |
| staged | every agent | node source per_job (the cluster deletes the copy with the job) and the fields of \
  hpc.staging.stager.Staged |
| packed | every agent, with --pack | node path seconds |
| environment | every agent, with --stage-env | node python seconds fallback (why the shared environment is used) |
| node_failed | the agent that failed | node cause detail |
| memory_emptied | an agent whose directory in memory was removed, and made again | node detail |
| not_forked | an agent whose ranks were not forked, because forks of torchrun could not use GPUs | node detail |
| rendezvous | head node's agent | round port members (node ranks) |
| checked | head node's agent: the preflight before a user's script passed | nodes (names) |
| preflight | rank 0 | world_size device (the GPUs' models, or CPU) allreduce_gb_per_second seconds |
| software | rank 0, after it | torch cuda driver python, and other versions |
| train_started | rank 0, at every start | step epoch total_steps world_size restored_from source train_seconds (of \
  the restored state) and the times below |
| numerics_changed | rank 0, after train_started: what the rounding depends on has changed, such as torch | \
  step changes (texts) |
| unrepeatable | rank 0, after train_started, unless --deterministic is off: operations of the model have no \
  deterministic kernel | operations (names) |
| first_step | rank 0, at every start of the ranks | step |
| checkpoint_saved | rank 0 | step seconds copy_seconds |
| checkpoint_failed | rank 0 | step reason |
| checkpoint_rejected | rank 0 | path reason |
| snapshot_saved | the agent that saved a snapshot as a checkpoint | step seconds |
| snapshot_off | rank 0 | reason |
| image_corrupt | rank 0 | path |
| slow_rank | head node's agent | rank node busy_seconds median_seconds |
| rank_failed | the agent of its node | round rank node exit_code signal cause step detail started_at failed_at |
| node_lost | head node's agent, or a surviving one | node last_heard detail |
| node_returned | head node's agent: a lost node whose link is back | node |
| interruption | head node's agent: what the attempt survived | cause step rank node detail failed_at noticed_at round \
  signature (by which the same failure is known) pause_seconds (before the ranks start again) |
| train_stopped | rank 0 | step signal seconds (from the signal to the saved state) |
| diverged | rank 0 | step (first with a loss that is not finite) loss |
| train_completed | rank 0 | step ended (patience, max_hours, or null for the last epoch) learned_nothing (a sentence \
  with the numbers, or null) |
| attempt_ended | head node's agent, its successor, or supervisor | cause step detail last_heard failed_at rank node \
  signature |
| requeued | head node's agent, or supervisor | job_id |
| resubmitted | the agent, supervisor or resume that submitted a new job | job_id old_job_id excluded (node names) |
| excluded | the agent or supervisor that changed the excluded nodes of a pending job | job_id excluded |
| released | supervisor: it ended Slurm's requeue delay or hold | attempt job_id |
| resubmitting | the agent, supervisor or resume that is about to submit a new job | attempt host pid started |
| scancelled | supervisor: the last job was cancelled with scancel | attempt job_id |
| not_continued | the agent that could start no next attempt | detail |
| notifying | who is about to send a message: an agent's process, or the supervisor's | notice recipient host |
| notification_sent | the same | notice recipient |
| notification_failed | the same | notice recipient reason |
| tracking | a process of the head node that sends the metrics | service url |
| tracking_failed | the same | service reason |
| notified | supervisor, before it calls --on-end | state |
| cancelled | cancel | by final (nothing may resume the run) |
| resumed | resume | attempt (the last one, or 0) number cancellations (as many of them no longer count) by changed \
  (flags with their values) revision (of the code, if it is new) stop_lead_seconds grace_seconds |

`step` of a failure is the last that any rank had done, of rank_failed the last that this rank had done. `started_at`,
`failed_at` and `last_heard` are seconds since the epoch. Of train_started, `source` is "checkpoint", "snapshot" or
null, `seconds` counts from the start of the process, `connect_seconds` are those until all ranks were connected,
`restore_seconds` those of reading and sharing the state.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.core.causes import Cause
from hpc.core.errors import TorchrelayError
from hpc.core.files import MOST, append_json_line, numbered_json_lines, refresh_nfs_cache
from hpc.core.rundir import RunDir

Event = dict[str, Any]
_OF_OTHER_NODES = re.compile(r"attempt-\d+-node-0*[1-9]")


@dataclass(frozen=True)
class EventWriter:
    """Appends to one file of a ledger, of which it is the only writer."""

    path: Path

    def append(self, event: str, **fields: Any) -> None:
        """Record that something happened, now."""
        append_json_line(self.path, record(event, **fields))


def record(event: str, **fields: Any) -> Event:
    """An event with its time."""
    return {"time": time.time(), "event": event, **fields}


def attempt_prefix(attempt: int) -> str:
    """How the names of the files begin that an attempt's agents write, each its own."""
    return f"attempt-{attempt:03d}-"


def read(events: Path, prefix: str = "") -> list[Event]:
    """All events of a run, in the order in which they happened; with `prefix`, those in files with such names.

    Damaged events are left out: every event has the fields of its kind, with the types that readers expect.
    """
    return _read(events, lambda name: name.startswith(prefix))[0]


def read_with_damage(events: Path) -> tuple[list[Event], list[str]]:
    """Return all events of a run, and a sentence for each damaged line."""
    return _read(events, lambda _: True)


def read_without_other_nodes(events: Path) -> list[Event]:
    """The same without the files of the agents of other nodes than the first.

    For what all agents of a job ask at the same time: a thousand nodes, each of which reads the files of a thousand
    nodes and of all attempts, would keep shared storage busy for minutes.
    """
    return _read(events, lambda name: _OF_OTHER_NODES.match(name) is None)[0]


def _read(events: Path, wanted: Callable[[str], bool]) -> tuple[list[Event], list[str]]:
    try:
        with os.scandir(events) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".jsonl") and wanted(entry.name))
    except FileNotFoundError:
        return [], []
    found, damage = list[Event](), list[str]()
    for name in names:
        for number, event in numbered_json_lines(f"{events}/{name}"):
            if event is not None and (problem := _problem_of(event)) is None:
                found.append(event)
            else:
                why = "it is not a JSON object" if event is None else problem
                damage.append(f"line {number} of {events.name}/{name} is damaged and left out: {why}")
    return sorted(found, key=_happened_at), damage


def _happened_at(event: Event) -> float:
    """When something happened. torchrun replaces ranks that have failed before the head node's agent records that."""
    is_rank_failure = event["event"] == "interruption" and event.get("cause") not in {Cause.HANG, Cause.NODE_FAILURE}
    at: float | None = event.get("failed_at") if is_rank_failure else None
    return event.get("time", 0.0) if at is None else at


_NUMBER, _INT, _TEXT, _LIST = frozenset({int, float}), frozenset({int}), frozenset({str}), frozenset({list})
_NONE = frozenset({type(None)})
# Each field that is read has the same types in all events.
_TYPES = {
    name: types
    for names, types in (
        ("time failed_at started_at noticed_at", _NUMBER | _NONE),
        ("last_heard stop_lead_seconds grace_seconds bytes_total eta_seconds", _NUMBER | _NONE),
        ("seconds copy_seconds connect_seconds restore_seconds train_seconds busy_seconds median_seconds", _NUMBER),
        ("bytes_done bytes_per_second", _NUMBER),
        ("attempt restart port agent_port number cancellations", _INT),
        ("step rank round world_size total_steps exit_code pid started", _INT | _NONE),
        ("event job_id secret cluster host service notice recipient", _TEXT),
        ("node cause detail signature signal reason url source activity device", _TEXT | _NONE),
        ("in_place shared learned_nothing ended", _TEXT | _NONE),
        ("nodes members addresses excluded", _LIST),
    )
    for name in names.split()
}
_ELEMENTS = {"nodes": str, "addresses": str, "excluded": str, "members": int}
_TIMES = frozenset({"time", "failed_at", "last_heard", "started_at", "noticed_at"})
_LATEST = 9e9  # the year 2255; pandas ends in 2262
# The fields that each kind of event must have, in addition to `event` and `time`.
_REQUIRED = {
    kind: ("time", *names.split())
    for kind, names in {
        "submitting": "host pid",
        "submitted": "job_id",
        "claimed": "attempt job_id restart secret nodes",
        "refused": "job_id restart detail",
        "deferred": "job_id restart detail",
        "joined": "node",
        "staging": "attempt node activity bytes_done bytes_per_second",
        "staged": "attempt node source",
        "environment": "node",
        "node_failed": "node",
        "not_forked": "node detail",
        "rendezvous": "attempt members",
        "checked": "nodes",
        "train_started": "attempt step world_size",
        "checkpoint_saved": "attempt seconds copy_seconds",
        "snapshot_off": "reason",
        "slow_rank": "rank node busy_seconds median_seconds",
        "rank_failed": "attempt rank round failed_at",
        "node_lost": "node",
        "node_returned": "node",
        "interruption": "attempt cause",
        "attempt_ended": "attempt cause",
        "requeued": "job_id",
        "resubmitted": "job_id excluded",
        "excluded": "job_id excluded",
        "resubmitting": "attempt host pid",
        "scancelled": "job_id",
        "not_continued": "attempt detail",
        "notifying": "notice recipient",
        "notification_sent": "notice recipient",
        "notification_failed": "notice recipient reason",
        "tracking": "attempt service",
        "tracking_failed": "attempt service reason",
        "resumed": "cancellations",
    }.items()
}


def _problem_of(event: Event) -> str | None:
    """Describe for the user what is wrong with an event; None if nothing is."""
    for name, value in event.items():
        types, kind = _TYPES.get(name), type(value)
        if types is None:
            continue
        most = _LATEST if name in _TIMES else MOST
        if (
            kind not in types
            or (kind in _NUMBER and not -most <= value <= most)
            or (kind is list and any(type(each) is not _ELEMENTS[name] for each in value))
        ):
            return f"{name} is {value!r:.60}"
    required = _REQUIRED.get(event.get("event", ""), ("event", "time"))
    return next((f"{name} is missing" for name in required if event.get(name) is None), None)


# --- one attempt at a time ---
#
# A node that has lost Slurm's network but not the storage continues to train while Slurm starts the same job elsewhere,
# as does a virtual machine that was suspended. Nothing can end their ranks in time. A process that publishes a
# checkpoint, metrics or a model therefore looks for the claim of the next attempt just before it publishes.


class SucceededError(TorchrelayError):
    """A later attempt has begun, so this one publishes nothing more."""


def claim_file(run: RunDir, attempt: int) -> Path:
    """The file that claims an attempt: the head node's agent creates it exclusively, then writes its events there."""
    return agent_file(run, attempt, 0)


def agent_file(run: RunDir, attempt: int, node_rank: int) -> Path:
    """The file of one node's agent in one attempt."""
    return run.events / f"{attempt_prefix(attempt)}node-{node_rank:02d}.jsonl"


def check_is_newest(run: RunDir, attempt: int) -> None:
    """Return if no later attempt has begun.

    Raises:
        SucceededError: one has.
        OSError: the run directory cannot be read.
    """
    refresh_nfs_cache(run.events)
    if claim_file(run, attempt + 1).exists():
        raise SucceededError(
            f"attempt {attempt + 1} of run {run.name} has begun: attempt {attempt} writes nothing more"
        )
