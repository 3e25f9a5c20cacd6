"""The ledger: what happened to a run, as JSON lines, one file per writer. Runs everywhere.

One writer per file, because appends by several hosts tear on NFS. Every record has `time` (seconds since the
epoch) and `event`; the events and their fields:

| event | by | fields |
|---|---|---|
| submitted | submit | job_id cluster started |
| claimed | the head node's agent, as its file's first line | attempt job_id restart nonce nodes |
| refused | the head node's agent | job_id restart detail |
| rendezvous | the head node's agent | attempt round port |
| joined | every agent | attempt node |
| staged | every agent | attempt node seconds path reused in_place |
| node_failed | an agent that cannot go on | attempt node detail |
| train_started | rank 0 | attempt step total_steps epoch world_size restored_from seconds |
| checkpoint_saved | rank 0 | attempt step seconds copy_seconds |
| checkpoint_failed | rank 0 | attempt step reason |
| checkpoint_rejected | rank 0 | attempt path reason |
| image_corrupt | rank 0 | attempt path |
| train_stopped | rank 0 | attempt step signal |
| train_completed | rank 0 | attempt step |
| left | every agent, when its torchrun is over | attempt node_rank exit_code |
| attempt_ended | the head node's agent | attempt cause step detail last_heard |
| requeued | the head node's agent | attempt job_id |
| cancelled | cancel | by |
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.files import append_json_line, read_json_lines

Event = dict[str, Any]


@dataclass(frozen=True)
class Writer:
    """Appends to one file of a ledger; the only one that does."""

    path: Path

    def append(self, event: str, **fields: Any) -> None:
        """Record that something happened, now."""
        append_json_line(self.path, record(event, **fields))


def record(event: str, **fields: Any) -> Event:
    """An event with its time."""
    return {"time": time.time(), "event": event, **fields}


def read(events: Path) -> list[Event]:
    """All events of all writers of a run, in the order of their times."""
    found = [event for path in sorted(events.glob("*.jsonl")) for event in read_json_lines(path)]
    return sorted(found, key=lambda event: event.get("time", 0.0))
