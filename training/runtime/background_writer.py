"""A thread that writes while the training goes on. Runs on the ranks that write."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs one write at a time in a thread. Submitting blocks until the previous write is done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write. Raises what the previous write raised."""
        self.wait()
        self._pending = self._thread.submit(write)

    @property
    def busy(self) -> bool:
        """Whether a write is running."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for the write that is running. Raises what it raised."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()
