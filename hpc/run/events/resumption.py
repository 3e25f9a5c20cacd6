"""The cancellations and resumptions of a run, and the spec in force. Runs everywhere.

A resumption is one file, `events/resume-001.jsonl`. Only one process can create it, with its whole `resumed` event.
`hpc resume` first writes the new spec to `spec-001.json`, next to `spec.json`. This spec has no effect until the event
exists, so an `hpc resume` that was killed in between has changed nothing.
"""

from pathlib import Path

from hpc.run.events import ledger
from hpc.run.events.history import History
from hpc.run.rundir import RunDir

_PREFIX = "resume-"


def current_spec(run: RunDir) -> Path:
    """Return the file of the spec in force: from the last resumption or, without one, from the submission."""
    last = max(run.events.glob(f"{_PREFIX}*.jsonl"), default=None)
    return run.revised_spec(int(last.stem.removeprefix(_PREFIX))) if last else run.spec


def resumption_file(run: RunDir, number: int) -> Path:
    """Return the file of the event of one `hpc resume`, which `record_once` writes."""
    return run.events / f"{_PREFIX}{number:03d}.jsonl"


def next_resumption(run: RunDir) -> int:
    """Return the number of the next resumption; the first is 1."""
    return sum(1 for _ in run.events.glob(f"{_PREFIX}*.jsonl")) + 1


def is_cancelled_now(run: RunDir) -> bool:
    """Return whether the run is cancelled. Reads only cancellations and resumptions, because agents ask often.

    On a full disk the file of a cancellation may be empty. The run is then not cancelled, because `hpc cancel` failed.
    """
    return History([*ledger.read(run.events, run.cancellation.name), *ledger.read(run.events, _PREFIX)]).is_cancelled
