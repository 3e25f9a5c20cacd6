"""Waiting while everything else is looked after: for other nodes, for other processes, for storage that may hang."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hpc.staging.copy import CopyProgress, Watch
from hpc.staging.source import stop_if
from hpc.staging.store import CacheEntry

_POLL_SECONDS = 0.05
# How often the processes that wait for this one's copy hear that it goes on.
_SAY_SECONDS = 5.0
_Result = TypeVar("_Result")


class CancellableWait:
    """What one staging does while it waits."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._said = watch, 0.0
        self.entry: CacheEntry | None = None
        """The copy that this process makes, once it does."""

    def look(self, progress: CopyProgress | None) -> bool:
        """Tell how far it is, and that it goes on. Returns whether to stop."""
        if self.entry is not None and time.monotonic() - self._said > _SAY_SECONDS:
            self._said = time.monotonic()
            self.entry.copies()
        return self._watch(progress)

    def stopped(self) -> bool:
        """Whether to stop."""
        return self.look(None)

    def wait(self) -> None:
        """Wait a moment.

        Raises:
            StagingStopped: somebody asked to stop.
        """
        stop_if(self.stopped())
        time.sleep(_POLL_SECONDS)

    def meanwhile(self, work: Callable[[], _Result]) -> _Result:
        """Do something in a thread, and wait for it; who is asked to stop does not."""
        results, errors = list[_Result](), list[BaseException]()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name="stage-wait")
        thread.start()
        while thread.is_alive():
            self.wait()
        if errors:
            raise errors[0]
        return results[0]
