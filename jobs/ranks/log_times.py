"""When the ranks of this node printed what: an index beside each log, for `hpc logs`. Runs in every agent.

The ranks write their logs themselves. A process in between could stamp each line, but what it holds would be lost with
it when the agent kills a rank with all its processes; so a thread looks how the logs grow. Twice a second, because they
are on shared storage.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc.core.rundir import RunDir

_INTERVAL_SECONDS = 0.5
# Shared storage that does not answer must not keep a round from ending.
_LAST_LOOK_SECONDS = 1.0


@contextmanager
def noted_log_times(run: RunDir, attempt: int, running: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Note in a thread when the logs of this node's ranks grow, until the end of the context.

    Args:
        run: the run.
        attempt: its number.
        running: the files of the process wrappers that run.
    """
    over = threading.Event()

    def look() -> None:
        times, is_last = LogTimes(run, attempt), False
        while not is_last:
            is_last = over.wait(_INTERVAL_SECONDS)
            with suppress(OSError):  # the storage is full or away: then lines have no time of their own
                times.note(running())

    thread = threading.Thread(target=look, daemon=True, name="log times")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_LOOK_SECONDS)


class LogTimes:
    """Notes the sizes of the logs of ranks, each with its time."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._ranks = dict[Path, int]()
        self._sizes = dict[int, int]()

    def note(self, running: Iterable[Path]) -> None:
        """Note the logs that have grown; also those of ranks that have run at an earlier call and ended since then."""
        for wrapper in running:
            if wrapper not in self._ranks:
                with suppress(FileNotFoundError):  # it has just ended
                    self._ranks[wrapper] = json.loads(wrapper.read_bytes())["rank"]
        for rank in set(self._ranks.values()):
            log = self._run.rank_log(self._attempt, rank)
            size = log.stat().st_size if log.exists() else 0
            if size > self._sizes.get(rank, 0):
                with self._run.rank_log_times(self._attempt, rank).open("a") as file:
                    file.write(f"{size} {time.time():.1f}\n")
                self._sizes[rank] = size
