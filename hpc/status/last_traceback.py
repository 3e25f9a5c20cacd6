"""Reads the end of a rank's log: the traceback that ended a run, or the last line. Runs on the login node."""

from pathlib import Path

from hpc.base.traceback_text import exception_lines
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded
from hpc.run.rundir import RunDir
from hpc.status.summary import LastOutput

_TAIL_BYTES = 65536
_MOST_LINES, _MOST_CHARACTERS = 40, 200


def last_traceback(run: RunDir, history: History) -> list[str] | None:
    """Return the last exception in the log of the rank that ended the last attempt; None if there is none."""
    end = history.last(AttemptEnded)
    if end is None or end.rank is None:
        return None
    found = exception_lines(_tail(run.rank_log(end.attempt, end.rank)))
    if not found:
        return None
    return found if len(found) <= _MOST_LINES else [found[0], "  ...", *found[2 - _MOST_LINES :]]


def last_output(run: RunDir, attempt: int) -> LastOutput | None:
    """Return rank 0's last line and its time, in seconds since the epoch; None if rank 0 has printed nothing."""
    log = run.rank_log(attempt, 0)
    words = [line.strip() for line in _tail(log) if line.strip()]
    if not words:
        return None
    return LastOutput(line=words[-1][:_MOST_CHARACTERS], time=log.stat().st_mtime)


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
