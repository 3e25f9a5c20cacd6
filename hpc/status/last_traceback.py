"""The traceback of the rank whose failure has ended a run, from its log. Runs on the login node."""

from collections.abc import Sequence
from pathlib import Path

from hpc.core.ledger import Event
from hpc.core.rundir import RunDir

_BEGIN = "Traceback (most recent call last)"
_TAIL_BYTES = 65536
_MOST_LINES = 40


def last_traceback(run: RunDir, events: Sequence[Event]) -> list[str] | None:
    """The last traceback of the rank that ended the last attempt, by lines; None if its log has none."""
    end = next((event for event in reversed(events) if event["event"] == "attempt_ended"), {})
    if not isinstance(rank := end.get("rank"), int):
        return None
    lines = _tail(run.rank_log(end["attempt"], rank))
    begins = [number for number, line in enumerate(lines) if _BEGIN in line]
    if not begins:
        return None
    first = begins[-1]
    # The line that names the exception is the first that is not indented.
    last = next((n for n in range(first + 1, len(lines)) if not lines[n].startswith((" ", "\t"))), len(lines) - 1)
    found = lines[first : last + 1]
    return found if len(found) <= _MOST_LINES else [found[0], "  ...", *found[2 - _MOST_LINES :]]


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
