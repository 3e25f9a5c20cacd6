"""The ledger: what happened to a run, as JSON lines, one file per writer. Runs everywhere.

One writer per file, because appends by several hosts tear on NFS. Every record has `time` (seconds since the epoch) and
`event`; all but submitting, submitted, refused, deferred, cancelled and those of messages have `attempt`. The events
and their other fields (a failure has those that are known):

| event | by | fields |
|---|---|---|
| submitting | submit, in a new run directory, before it submits the first job | cluster host pid started |
| submitted | submit; without Slurm the process that starts the controller, of resume too | job_id cluster started \
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
| not_forked | an agent whose ranks could not be forks of torchrun, as they could use no GPUs | node detail |
| rendezvous | head node's agent | round port members (node ranks) |
| checked | head node's agent: the preflight before a user's script passed | nodes (names) |
| preflight | rank 0 | world_size device (the GPUs' models, or CPU) allreduce_gb_per_second seconds |
| software | rank 0, after it | torch cuda driver python, and other versions |
| train_started | rank 0, at every start | step epoch total_steps world_size restored_from source train_seconds (of \
  the restored state) and the times below |
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
from hpc.core.files import append_json_line, read_json_lines, refresh_nfs_cache
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
    """All events of a run, in the order in which they happened; with `prefix`, those in files with such names."""
    return _read(events, lambda name: name.startswith(prefix))


def read_without_other_nodes(events: Path) -> list[Event]:
    """The same without the files of the agents of other nodes than the first.

    For what all agents of a job ask at the same time: a thousand nodes, each of which reads the files of a thousand
    nodes and of all attempts, would keep shared storage busy for minutes.
    """
    return _read(events, lambda name: _OF_OTHER_NODES.match(name) is None)


def _read(events: Path, wanted: Callable[[str], bool]) -> list[Event]:
    try:
        with os.scandir(events) as entries:
            paths = sorted(entry.path for entry in entries if entry.name.endswith(".jsonl") and wanted(entry.name))
    except FileNotFoundError:
        return []
    found = [event for path in paths for event in read_json_lines(path)]
    return sorted((event for event in found if "event" in event), key=_happened_at)


def _happened_at(event: Event) -> float:
    """When something happened. torchrun replaces ranks that have failed before the head node's agent records that."""
    is_rank_failure = event["event"] == "interruption" and event.get("cause") not in {Cause.HANG, Cause.NODE_FAILURE}
    at: float | None = event.get("failed_at") if is_rank_failure else None
    return event.get("time", 0.0) if at is None else at


# --- one attempt at a time ---
#
# A node that has lost Slurm's network but not the storage trains on while Slurm starts the same job elsewhere; a
# virtual machine that stood still goes on where it was. Nobody can end their ranks in time. So whoever publishes a
# checkpoint, metrics or a model looks for the claim of the next attempt first, just before it publishes.


class SucceededError(TorchrelayError):
    """A later attempt has begun, so this one publishes nothing more."""


def claim_file(run: RunDir, attempt: int) -> Path:
    """The file that claims an attempt, created exclusively; the head node's agent goes on to write its events there."""
    return run.events / f"{attempt_prefix(attempt)}node-00.jsonl"


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
