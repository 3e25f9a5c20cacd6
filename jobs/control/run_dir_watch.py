"""Notices that the run directory was deleted, moved or replaced while the run uses it. Runs in every agent.

Without its directory, a run can save nothing and cannot go on. Storage that does not answer is an outage, which passes:
only a directory that is missing on storage that works is gone.
"""

import threading
import time
from pathlib import Path

from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt
from hpc.run.events.kinds import Claimed
from hpc.run.rundir import RunDir

# Servers that fail over may answer wrongly for seconds.
_LOOK_SECONDS, _LOOKS = 5.0, 4


class RunDirGoneError(Exception):
    """The run directory was deleted, moved or replaced. The attempt ends, and writes nothing more."""


class RunDirWatch:
    """Looks for this attempt's claim in the run directory, in a thread, because storage may hang."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._run, self._claim, self._secret = run, ledger.claim_file(run, attempt.attempt), attempt.secret
        self._device = 0
        self._parents = dict[Path, tuple[int, int]]()
        self._is_gone = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="run-dir").start()

    def check(self) -> None:
        """Raise RunDirGoneError if the run directory is gone."""
        if self._is_gone.is_set():
            raise RunDirGoneError(
                f"{self._run.path} was deleted, moved or replaced while the run used it: this job ends"
            )

    def _look(self) -> None:
        missed = 0
        while missed < _LOOKS:
            missed = missed + 1 if self.is_missing() else 0
            time.sleep(_LOOK_SECONDS)
        self._is_gone.set()

    def is_missing(self) -> bool:
        """Return whether the storage works, and does not have this attempt's claim in the run directory."""
        try:
            if not self._parents:
                self._device = self._run.path.stat().st_dev
                self._parents = {parent: _identity(parent) for parent in self._run.path.parents}
            with self._claim.open("rb") as file:
                claim = ledger.decoded(file.readline())
            return isinstance(claim, Claimed) and claim.secret != self._secret
        except (FileNotFoundError, NotADirectoryError):
            return self._storage_works()
        except (OSError, ValueError):
            return False

    def _storage_works(self) -> bool:
        """Return whether the nearest directory above the run directory is still the same, on the same file system.

        If a file system is not mounted, its mount point is an empty directory, or missing.
        """
        for parent, identity in self._parents.items():
            try:
                return _identity(parent) == identity and identity[0] == self._device
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return False
        return False


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino
