"""The traceback of the rank whose failure has ended a run, from its log. Runs on the login node."""

from collections.abc import Sequence
from pathlib import Path

from hpc.core.ledger import Event
from hpc.core.rundir import RunDir
from hpc.core.traceback_text import exception_lines

_TAIL_BYTES = 65536
_MOST_LINES = 40


def last_traceback(run: RunDir, events: Sequence[Event]) -> list[str] | None:
    """The last exception of the rank that ended the last attempt, by lines; None if its log has none."""
    end = next((event for event in reversed(events) if event["event"] == "attempt_ended"), {})
    if not isinstance(rank := end.get("rank"), int):
        return None
    found = exception_lines(_tail(run.rank_log(end["attempt"], rank)))
    if not found:
        return None
    return found if len(found) <= _MOST_LINES else [found[0], "  ...", *found[2 - _MOST_LINES :]]


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
