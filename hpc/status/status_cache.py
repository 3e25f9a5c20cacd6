"""Many runs at a glance, once or again and again: squeue is asked at most once a look. Runs on the login node."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from hpc.slurm.squeue import SlurmJob
from hpc.status.run_view import TERMINAL, Summary, jobs_by_run, summarize

# Whoever looks every second must not be a burden to the controller.
_QUEUE_SECONDS = 5.0
# One that is down makes each question take half a minute.
_AWAY_SECONDS = 30.0


@dataclass
class StatusCache:
    """Remembers what cannot have changed since the last look: runs that have ended, and the queue for some seconds."""

    problem: str | None = None
    """Why only the run directories were asked the last time, although there is a Slurm."""
    _jobs: Mapping[str, SlurmJob] | None = None
    _asked: float | None = None
    _ended: dict[Path, tuple[int, Summary]] = field(default_factory=dict)

    def summaries(self, runs: Sequence[RunDir]) -> list[Summary]:
        """One summary per run; a run that is gone has none."""
        jobs = self._queue(runs)
        own = jobs_by_run(runs, jobs) if jobs is not None else {}
        rows = (self._row(run, own.get(run.path)) for run in runs)
        return [row for row in rows if row is not None]

    def summary(self, run: RunDir) -> Summary:
        """The summary of a single run.

        Raises:
            TorchrelayError: it is gone.
        """
        rows = self.summaries([run])
        if not rows:
            raise TorchrelayError(f"run {run.name} is gone: there is no {run.spec} any more")
        return rows[0]

    def _row(self, run: RunDir, jobs: Sequence[SlurmJob] | None) -> Summary | None:
        # Whoever takes a run up again, or ends it, adds a file to its ledger.
        stamp = _changed(run.events)
        before, row = self._ended.get(run.path, (None, None))
        if row is None or stamp is None or stamp != before or jobs:
            row = summarize(run, jobs)
            if stamp is not None and row["state"] in TERMINAL:
                self._ended[run.path] = stamp, row
        return row if stamp is not None or run.spec.exists() else None

    def _queue(self, runs: Sequence[RunDir]) -> Mapping[str, SlurmJob] | None:
        """The user's jobs, or None where there is no Slurm or it does not answer."""
        patience = _AWAY_SECONDS if self.problem else _QUEUE_SECONDS
        if self._asked is None or time.monotonic() - self._asked > patience:
            self._jobs = self._ask(runs)
            self._asked = time.monotonic()
        return self._jobs

    def _ask(self, runs: Sequence[RunDir]) -> Mapping[str, SlurmJob] | None:
        self.problem = None
        # A run without a script is this machine's alone.
        if not any(run.script.exists() for run in runs) or not slurm.is_available():
            return None
        try:
            return slurm.jobs()
        except TorchrelayError as error:
            self.problem = f"Slurm does not answer, so only the run directories are asked: {error}"
            return None


def _changed(directory: Path) -> int | None:
    """When an entry of a directory was last made or removed, in nanoseconds; None if it cannot be told."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None
