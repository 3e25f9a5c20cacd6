"""What a run's `hpc cancel` and `hpc resume` mean for it now, and which spec is in force. Runs everywhere.

A resumption is one file, `events/resume-001.jsonl`, created exclusively with its whole `resumed` event. The spec that
it puts into force is beside `spec.json`, and written before: `spec-001.json`, whole. Without the event it counts for
nothing, so an `hpc resume` that was killed in between has changed nothing.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc.core import ledger
from hpc.core.files import json_line, write_exclusive
from hpc.core.ledger import Event
from hpc.core.rundir import RunDir

_PREFIX = "resume-"


def current_spec(run: RunDir) -> Path:
    """The file of the spec in force: that of the last resumption, or of the submission. Every reader asks here."""
    last = max(run.events.glob(f"{_PREFIX}*.jsonl"), default=None)
    return run.revised_spec(int(last.stem.removeprefix(_PREFIX))) if last else run.spec


def resumption_file(run: RunDir, number: int) -> Path:
    """The file of the events of one `hpc resume`."""
    return run.events / f"{_PREFIX}{number:03d}.jsonl"


def next_resumption(run: RunDir) -> int:
    """The number of the next resumption; the first is 1."""
    return sum(1 for _ in run.events.glob(f"{_PREFIX}*.jsonl")) + 1


def record_resumption(run: RunDir, number: int, events: Iterable[Event], **fields: Any) -> bool:
    """Record that the user has resumed the run; False if another process was first.

    `events` are those of the run that its user has seen: the cancellations among them no longer count.
    """
    seen = sum(event["event"] == "cancelled" for event in events)
    event = ledger.record("resumed", number=number, cancellations=seen, **fields)
    return write_exclusive(resumption_file(run, number), json_line(event))


def is_cancelled(events: Iterable[Event]) -> bool:
    """Whether the user has cancelled the run, and not resumed it since. Pure.

    Cancellations are counted, because the clocks of two machines differ.
    """
    own = [event for event in events if event["event"] in {"cancelled", "resumed"}]
    taken_back = max((event["cancellations"] for event in own if event["event"] == "resumed"), default=0)
    return bool(sum(event["event"] == "cancelled" for event in own) > taken_back)


def is_cancelled_for_good(events: Iterable[Event]) -> bool:
    """Whether the user has cancelled the run with --final. Pure."""
    return any(event["event"] == "cancelled" and event.get("final") for event in events)


def is_cancelled_now(run: RunDir) -> bool:
    """`is_cancelled`, from the two kinds of file that it depends on: agents ask again and again.

    On a full disk the file of a cancellation may be empty: then the call of `hpc cancel` has failed.
    """
    return is_cancelled([*ledger.read(run.events, run.cancellation.name), *ledger.read(run.events, _PREFIX)])
