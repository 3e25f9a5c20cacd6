"""The ledger: the events of a run as JSON lines in one file per writer. Runs everywhere.

Each file has one writer, because appends by several hosts tear on NFS.
"""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec

from hpc.base.errors import TorchrelayError
from hpc.base.files import append_line, json_line, numbered_lines, refresh_nfs_cache, write_exclusive
from hpc.run.causes import Cause
from hpc.run.events.kinds import KINDS, UNDATED, Event, Interrupted
from hpc.run.rundir import RunDir

_OF_OTHER_NODES = re.compile(r"attempt-\d+-node-0*[1-9]")


@dataclass(frozen=True)
class EventWriter:
    """Appends events to one file of a ledger, to which no other process writes."""

    path: Path
    attempt: int | None = None
    """The attempt of all events of this writer; if None, each event keeps its own attempt."""

    def append(self, event: Event) -> None:
        """Append an event in the writer's attempt. An undated event happens now."""
        own = event if self.attempt is None else msgspec.structs.replace(event, attempt=self.attempt)
        append_line(self.path, line_of(own))


def dated(event: Event) -> Event:
    """Return the event with the present time."""
    return msgspec.structs.replace(event, time=time.time())


def line_of(event: Event) -> str:
    """Return an event as one line of a ledger.

    An undated event gets the present time. The line is ASCII, so that it can hold names which are not UTF-8. A field
    that equals its default is left out: agents of an earlier release may still run, and reject null for some fields.
    """
    event = dated(event) if event.time == UNDATED else event
    usual = {field.name: field.default for field in msgspec.structs.fields(type(event))}
    values = {name: value for name in usual if (value := getattr(event, name)) != usual[name]}
    return json_line({"event": event.kind, **values})


def record_once(path: Path, event: Event) -> bool:
    """Write a new file of a ledger with one event. Return False if another process has made that file."""
    return write_exclusive(path, line_of(event))


def attempt_prefix(attempt: int) -> str:
    """Return the prefix of the names of the files with an attempt's events."""
    return f"attempt-{attempt:03d}-"


def read(events: Path, prefix: str = "") -> list[Event]:
    """Return the events of a run, in the order of their times, from the files whose names begin with `prefix`.

    Damaged events are left out.
    """
    return read_with_damage(events, lambda name: name.startswith(prefix))[0]


def read_without_other_nodes(events: Path) -> list[Event]:
    """Return the events of a run. Of the nodes' files, only the files of the first node are read.

    All agents of a job call this at the same time: if each of a thousand nodes read the files of a thousand nodes in
    all attempts, shared storage would be busy for minutes.
    """
    return read_with_damage(events, lambda name: _OF_OTHER_NODES.match(name) is None)[0]


def read_with_damage(events: Path, wanted: Callable[[str], bool] = lambda _: True) -> tuple[list[Event], list[str]]:
    """Return the events of a run, from the files with a `wanted` name, and a sentence for each damaged line."""
    try:
        with os.scandir(events) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".jsonl") and wanted(entry.name))
    except FileNotFoundError:
        return [], []
    events_read, damage = list[Event](), list[str]()
    for name in names:
        for number, line in numbered_lines(f"{events}/{name}"):
            try:
                events_read.append(decoded(line))
            except (ValueError, RecursionError) as error:
                damage.append(f"line {number} of {events.name}/{name} is damaged and left out: {error}")
    return sorted(events_read, key=_happened_at), damage


_ANY_EVENT: Any = Union[KINDS]  # noqa: UP007 - a tuple of types
_decoder = msgspec.json.Decoder(_ANY_EVENT)


def decoded(line: bytes) -> Event:
    """Return the event on a line of a ledger.

    Raises:
        ValueError, RecursionError: the line is torn, or a field is missing or has a value of another type.
    """
    try:
        event: Event = _decoder.decode(line)
    except msgspec.ValidationError:
        raise
    except ValueError:
        # The json module reads the escapes of names that are not UTF-8, which msgspec refuses.
        event = msgspec.convert(json.loads(line), _ANY_EVENT)
    if event.time == UNDATED:
        raise msgspec.ValidationError("Object missing required field `time`")
    return event


def _happened_at(event: Event) -> float:
    """Return the time that orders an event. A rank's failure may be recorded after the restart that it caused."""
    if isinstance(event, Interrupted) and event.cause not in {Cause.HANG, Cause.NODE_FAILURE}:
        return event.time if event.failed_at is None else event.failed_at
    return event.time


# --- one attempt at a time ---
#
# A node may lose Slurm's network but not the storage, or be a virtual machine that was suspended. It then continues to
# train although Slurm has started the same job elsewhere, and nothing can end its ranks in time. So a process that
# publishes a checkpoint, metrics or a model looks for the claim of the next attempt just before it publishes.


class SucceededError(TorchrelayError):
    """A later attempt has begun, so this one publishes nothing more."""


def claim_file(run: RunDir, attempt: int) -> Path:
    """Return the file that claims an attempt: the first node's agent creates it, then writes its events there.

    Copies of relay from version 0.2 look for the next attempt's file by this name. Later ones get its path.
    """
    return agent_file(run, attempt, 0)


def agent_file(run: RunDir, attempt: int, node_rank: int) -> Path:
    """Return the file of one node's agent in one attempt."""
    return run.events / f"{attempt_prefix(attempt)}node-{node_rank:02d}.jsonl"


def check_is_newest(run: RunDir, attempt: int) -> None:
    """Check that no later attempt has begun.

    Raises:
        SucceededError: a later attempt has begun.
        OSError: the run directory cannot be read.
    """
    refresh_nfs_cache(run.events)
    if claim_file(run, attempt + 1).exists():
        raise SucceededError(
            f"attempt {attempt + 1} of run {run.name} has begun: attempt {attempt} writes nothing more"
        )
