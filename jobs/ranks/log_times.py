"""When the ranks of this node printed what: an index beside each log, for `hpc logs`. Runs in every agent.

The ranks write their logs themselves. A process in between could stamp each line, but what it holds would be lost with
it when the agent kills a rank with all its processes; so a thread looks how the logs grow. Twice a second, because they
are on shared storage.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from hpc.core.rundir import RunDir

_INTERVAL_SECONDS = 0.5
# Shared storage that does not answer must not keep a round from ending.
_LAST_LOOK_SECONDS = 1.0


@contextmanager
def noted_log_times(run: RunDir, attempt: int, ranks: Sequence[int]) -> Iterator[None]:
    """Note in a thread when the logs of these ranks grow, until the end of the context."""
    over, sizes = threading.Event(), dict.fromkeys(ranks, 0)

    def look() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(_INTERVAL_SECONDS)
            with suppress(OSError):  # the storage is full or away: then lines have no time of their own
                for rank in ranks:
                    sizes[rank] = _note(run, attempt, rank, sizes[rank])

    thread = threading.Thread(target=look, daemon=True, name="log times")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_LOOK_SECONDS)


def _note(run: RunDir, attempt: int, rank: int, known_size: int) -> int:
    """Note the size of a log, if it has grown. Returns it."""
    log = run.rank_log(attempt, rank)
    size = log.stat().st_size if log.exists() else 0
    if size > known_size:
        with run.rank_log_times(attempt, rank).open("a") as file:
            file.write(f"{size} {time.time():.1f}\n")
    return size
