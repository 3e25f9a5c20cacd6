"""Owns the thread in which a rank writes files while it trains. Imports no torch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs writes in a thread, one at a time and in order. The thread calls `prepare` when it begins."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer", initializer=prepare)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Wait for the previous write, and start this one. Raises what the previous one raised."""
        self.wait()
        self._pending = self._thread.submit(write)

    def enqueue(self, write: Callable[[], None]) -> None:
        """Queue a write behind the previous one, and return at once. If the previous one fails, this one fails too."""
        previous = self._pending

        def run() -> None:
            if previous:
                previous.result()
            write()

        self._pending = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        """Whether a write is running."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for all writes. Raises what the last one raised. Any thread may call this."""
        if pending := self._pending:
            pending.result()
