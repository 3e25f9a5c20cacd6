"""Owns the thread that writes a rank's files while the rank trains. Imports no torch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs writes in a thread, one at a time and in order. The thread calls `prepare` when it starts."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer", initializer=prepare)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Wait for the previous write, and start this one. Raises the error of the previous write."""
        self.wait()
        self._pending = self._thread.submit(write)

    def enqueue(self, write: Callable[[], None]) -> None:
        """Queue a write after the previous one, and return at once. If the previous write fails, this one fails too."""
        previous = self._pending

        def run() -> None:
            if previous:
                previous.result()
            write()

        self._pending = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        """Whether a write is running or queued."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for all writes. Raises the error of the last one. Any thread may call this."""
        if pending := self._pending:
            pending.result()
