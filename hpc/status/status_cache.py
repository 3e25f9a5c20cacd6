"""Summaries of many runs, once or repeatedly: at most one squeue call each time. Runs on the login node."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.squeue import SlurmJob
from hpc.status.run_view import TERMINAL, Summary, jobs_by_run, summarize

# A poll every second must not load the controller.
_QUEUE_SECONDS = 5.0
# While the controller is down, each call of squeue takes half a minute to fail.
_AWAY_SECONDS = 30.0


@dataclass
class StatusCache:
    """Caches what cannot have changed since the last call: runs that have ended, and the queue for some seconds."""

    problem: str | None = None
    """Why the last summaries come from the run directories alone, although there is a Slurm."""
    _jobs: Mapping[str, SlurmJob] | None = None
    _queried: float | None = None
    _ended: dict[Path, tuple[int, Summary]] = field(default_factory=dict)

    def summaries(self, runs: Sequence[RunDir]) -> list[Summary]:
        """One summary per run; a deleted run has none."""
        jobs = self._queue(runs)
        own = jobs_by_run(runs, jobs) if jobs is not None else {}
        rows = (self._cached(run, own.get(run.path)) for run in runs)
        return [row for row in rows if row is not None]

    def summary(self, run: RunDir) -> Summary:
        """The summary of a single run.

        Raises:
            TorchrelayError: it was deleted.
        """
        rows = self.summaries([run])
        if not rows:
            raise TorchrelayError(f"run {run.name} was deleted: {run.spec} does not exist")
        return rows[0]

    def _cached(self, run: RunDir, jobs: Sequence[SlurmJob] | None) -> Summary | None:
        # A process that resumes or ends a run adds a file to its ledger.
        stamp = _changed(run.events)
        before, row = self._ended.get(run.path, (None, None))
        if row is None or stamp is None or stamp != before or jobs:
            row = summarize(run, jobs)
            if stamp is not None and row["state"] in TERMINAL:
                self._ended[run.path] = stamp, row
        return row if stamp is not None or run.spec.exists() else None

    def _queue(self, runs: Sequence[RunDir]) -> Mapping[str, SlurmJob] | None:
        """The user's jobs, or None where there is no Slurm or it does not answer."""
        max_age = _AWAY_SECONDS if self.problem else _QUEUE_SECONDS
        if self._queried is None or time.monotonic() - self._queried > max_age:
            self._jobs = self._query(runs)
            self._queried = time.monotonic()
        return self._jobs

    def _query(self, runs: Sequence[RunDir]) -> Mapping[str, SlurmJob] | None:
        self.problem = None
        # A run without a script is no run of Slurm's.
        if not any(run.script.exists() for run in runs) or not slurm.is_available():
            return None
        try:
            return slurm.jobs()
        except TorchrelayError as error:
            self.problem = f"Slurm does not answer, so this is what the run directories record: {error}"
            return None


def _changed(directory: Path) -> int | None:
    """When an entry of a directory was last created or removed, in nanoseconds; None if it cannot be read."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None
