"""Progress of one staging, its cancellation, and waits that can be cancelled. Runs on compute nodes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

_POLL_SECONDS, _JOIN_SECONDS = 0.05, 5.0
# A process that has not polled for this long was suspended with its job: its storage has not hung meanwhile.
_SUSPENDED_SECONDS = 2.0
# Interval of the heartbeats to processes that wait for the copy that this one makes.
_HEARTBEAT_SECONDS = 5.0
_Result = TypeVar("_Result")


class StagingStopped(Exception):  # noqa: N818 - a request, not an error
    """Staging was asked to stop. The partial copy is never used; the next staging removes it."""


class NoProgressError(Exception):
    """Storage has not answered for too long. A thread that waits for it in the kernel cannot be ended."""


def stop_if(stop: bool) -> None:
    """Raise StagingStopped if `stop` is true."""
    if stop:
        raise StagingStopped


@dataclass(frozen=True, kw_only=True)
class CopyProgress:
    """The progress of a copy."""

    activity: str = "copying"
    bytes_done: int
    bytes_total: int | None = None
    """The bytes to copy; None while unknown."""
    at_storage: bool = True
    """Whether a thread reads or writes now; if not, the copy waits for other nodes."""


Watch = Callable[[CopyProgress | None], bool]
"""Function called several times a second with the progress, or None while staging waits. Returns whether to stop."""


class CancellableWait:
    """The waits of one staging: for other nodes, other processes, or storage that may hang."""

    def __init__(self, watch: Watch, timeout_seconds: float = float("inf")) -> None:
        """Prepare the waits. Storage without progress for more than `timeout_seconds` counts as hanging."""
        self._watch, self._heartbeat_at = watch, 0.0
        self._timeout_seconds = timeout_seconds
        self._done: int | None = None
        self._asked_at = self._advanced_at = time.monotonic()
        self.heartbeat: Callable[[], None] | None = None
        """A function to call every few seconds while this process makes a copy that others may wait for."""

    def update(self, progress: CopyProgress | None, done: int | None = None) -> bool:
        """Report the progress and send the heartbeat. Returns whether to stop.

        `done` counts what the storage has done, unless `progress` counts it; None if nothing waits for the storage.
        Raises NoProgressError if the storage has made no progress for too long.
        """
        self._check_progress(progress.bytes_done if progress and progress.at_storage else done)
        if self.heartbeat is not None and time.monotonic() - self._heartbeat_at > _HEARTBEAT_SECONDS:
            self._heartbeat_at = time.monotonic()
            self.heartbeat()
        return self._watch(progress)

    def _check_progress(self, done: int | None) -> None:
        before, self._asked_at = self._asked_at, time.monotonic()
        if done is None or done != self._done or self._asked_at - before > _SUSPENDED_SECONDS:
            self._done, self._advanced_at = done, self._asked_at
        elif self._asked_at - self._advanced_at > self._timeout_seconds:
            raise NoProgressError("its storage hangs")

    def stopped(self) -> bool:
        """Return whether to stop."""
        return self.update(None)

    def wait(self) -> None:
        """Wait for one poll interval. Raises StagingStopped if staging was asked to stop."""
        stop_if(self.stopped())
        time.sleep(_POLL_SECONDS)

    def run_in_thread(
        self,
        work: Callable[[], _Result],
        progress: Callable[[], CopyProgress | None] = lambda: None,
        cancel: threading.Event | None = None,
        done: Callable[[], int | None] = lambda: None,
    ) -> _Result:
        """Run a blocking call in a thread, because storage or the network may hang, and wait for it.

        `progress` and `done` return what `update` takes. `cancel` is set when staging is asked to stop: the thread then
        has some seconds to end before it is abandoned. Raises StagingStopped if staging was asked to stop, or
        NoProgressError if the storage hangs.
        """
        future = Future[_Result]()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - `result` raises it again
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True, name="stage-wait")
        thread.start()
        try:
            while thread.is_alive():
                stop_if(self.update(progress(), done()))
                thread.join(_POLL_SECONDS)
        except BaseException:
            if cancel is not None:
                cancel.set()
                thread.join(_JOIN_SECONDS)
            raise
        return future.result()
