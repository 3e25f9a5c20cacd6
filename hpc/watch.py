"""What the supervisor sees of each run: its directory, its jobs, the signs of life of its agents. On the login node."""

import os
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc import ledger
from hpc.attempts import attempts_of
from hpc.decide import BUSY_SECONDS, View
from hpc.job import Job
from hpc.ledger import Event
from hpc.processes import is_alive
from hpc.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run as it is at one moment."""

    run: RunDir
    view: View
    events: Sequence[Event]

    @property
    def last_job_id(self) -> str | None:
        """The job that Slurm was given last."""
        ids = [event["job_id"] for event in self.events if "job_id" in event]
        return ids[-1] if ids else None


def look(run: RunDir, jobs: Mapping[str, Sequence[Job]], storage_time: float) -> Watched:
    """See how a run is.

    Args:
        run: the run.
        jobs: by script, as `hpc.job.by_script` tells.
        storage_time: `storage_time` of the directory of the runs.

    Raises:
        OSError: its directory is gone, or closed.
    """
    now = time.time()
    if run.final_result.exists():
        return Watched(run=run, events=(), view=View(finished=True, now=now))
    events = ledger.read(run.events)
    attempts = attempts_of(events)
    alive = _modified(run.alive)
    last = attempts[-1].attempt if attempts else 0
    handed_over = [event["time"] for event in _of(events, last, "requeued", "relaunched")]
    excluded = [event["excluded"] for event in events if event["event"] in {"relaunched", "excluded"}]
    view = View(
        cancelled=any(event["event"] == "cancelled" for event in events),
        attempts=attempts,
        jobs=jobs.get(os.path.realpath(run.script), ()),
        alive_at=None if alive is None else now - (storage_time - alive),
        excluded=excluded[-1] if excluded else (),
        handed_over_at=max(handed_over, default=None),
        busy_until=_busy_until(_of(events, last, "relaunching"), handed_over),
        now=now,
    )
    return Watched(run=run, events=events, view=view)


def _of(events: Iterable[Event], attempt: int, *kinds: str) -> list[Event]:
    return [event for event in events if event["event"] in kinds and event.get("attempt") == attempt]


def _busy_until(claims: Sequence[Event], done: Sequence[float]) -> float:
    """Until when another supervisor should be left to submit the job that it has claimed; 0: there is none."""
    if not claims or (done and max(done) >= claims[-1]["time"]):
        return 0.0
    claim = claims[-1]
    here = claim["host"] == socket.gethostname()
    if here and not is_alive(claim["pid"], claim["started"]):
        return 0.0
    return float(claim["time"] + BUSY_SECONDS)


def _modified(path: Path) -> float | None:
    """When a file was changed, by its storage's clock. NFS knows it for sure only after an open."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def storage_time(directory: Path) -> float:
    """What time it is by the clock of a directory's storage, which may not be this machine's."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b".")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
