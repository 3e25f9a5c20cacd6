"""Writing while the training goes on. Runs on rank 0."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """A thread that does one thing after the other, and a queue that holds one: whoever brings the next one waits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Have it done, after what was started before has been.

        Raises:
            Exception: what the work before raised.
        """
        self.wait()
        self._pending = self._thread.submit(work)

    @property
    def busy(self) -> bool:
        """Whether something is being done."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Until everything is done.

        Raises:
            Exception: what the work raised.
        """
        pending, self._pending = self._pending, None
        if pending:
            pending.result()
