"""What the supervisor sees of each run: its directory, its jobs, the signs of life of its agents. On the login node."""

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.core import ledger
from hpc.core.attempts import attempts_of, last_job_id
from hpc.core.kernel import is_alive
from hpc.core.ledger import Event
from hpc.core.outcome import JobState
from hpc.core.rundir import RunDir
from hpc.slurm.squeue import SlurmJob
from hpc.supervise.decide import BUSY_SECONDS
from hpc.supervise.decision import RunObservation


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A run as it is at one moment."""

    run: RunDir
    view: RunObservation
    events: Sequence[Event]
    touched: float | None
    """When `alive` was changed, by its storage's clock."""

    @property
    def forgotten_job_id(self) -> str | None:
        """The job that Slurm was given last, if squeue does not tell of it."""
        job_id = last_job_id(self.events)
        return None if any(job.job_id == job_id for job in self.view.jobs) else job_id


def look(run: RunDir, jobs: Mapping[str, Sequence[SlurmJob]], storage_time: float) -> ObservedRun:
    """See how a run is.

    Args:
        run: the run.
        jobs: by script, as `hpc.slurm.squeue.jobs_by_script` returns them.
        storage_time: `storage_time` of the directory of the runs.

    Raises:
        OSError: its directory is gone, or closed.
    """
    now, touched = time.time(), modified(run.alive)
    own = jobs.get(os.path.realpath(run.script), ())
    alive_at = None if touched is None else now - (storage_time - touched)
    if run.final_result.exists():
        view = RunObservation(finished=True, jobs=own, alive_at=alive_at, now=now)
        return ObservedRun(run=run, events=(), view=view, touched=touched)
    events = ledger.read(run.events)
    view = _view(events, RunObservation(jobs=own, alive_at=alive_at, now=now))
    return ObservedRun(run=run, events=events, view=view, touched=touched)


def _view(events: Sequence[Event], known: RunObservation) -> RunObservation:
    """What the ledger tells, beside what is known already."""
    attempts = attempts_of(events)
    own = [event for event in events if event.get("attempt") == (attempts[-1].attempt if attempts else 0)]
    queued = [event["time"] for event in own if event["event"] in {"requeued", "relaunched"}]
    handed_over = [*queued, *(event["time"] for event in own if event["event"] == "released")]
    claims = [event for event in own if event["event"] == "relaunching"]
    half_done = bool(claims) and claims[-1]["time"] > max(queued, default=0.0)
    excluded = [event["excluded"] for event in events if event["event"] in {"relaunched", "excluded"}]
    job_id = last_job_id(events)
    return replace(
        known,
        cancelled=any(event["event"] == "cancelled" for event in events),
        dropped=any(event["event"] == "dropped" and event["job_id"] == job_id for event in events),
        attempts=attempts,
        fate=next((job.state for job in known.jobs if job.job_id == job_id), JobState.UNKNOWN),
        launches=len(queued),
        handed_over_at=max(handed_over, default=None),
        half_done=half_done,
        busy_until=_busy_until(claims[-1]) if half_done else 0.0,
        excluded=excluded[-1] if excluded else (),
    )


def _busy_until(claim: Event) -> float:
    """Until when who claimed the next job should be left to submit it; 0: that process is no more."""
    here = claim["host"] == socket.gethostname()
    if here and not is_alive(claim["pid"], claim["started"]):
        return 0.0
    return float(claim["time"] + BUSY_SECONDS)


def modified(path: Path) -> float | None:
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
