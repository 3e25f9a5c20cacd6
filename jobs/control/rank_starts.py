"""Notices that all ranks have started, and that some have ended while others run. Runs in the first node's agent.

The ranks of a round start together, on all nodes, each time that torchrun restarts them. Ranks of a correct script also
end together. If a rank ends early with exit code 0, the others wait for it in a collective until that fails: with gloo
at once, or after half an hour.
"""

import time
from collections.abc import Iterable, Sequence

from hpc.base.text import rank_names
from hpc.run.events.kinds import RanksEnded, RanksStarted
from jobs.control.messages import RankStart

# Ranks that finish together have ended within this time of each other; an evaluation or a save takes longer.
_TOGETHER_SECONDS = 10.0


class RankStarts:
    """Keeps which starts and ends of ranks have been reported."""

    def __init__(self) -> None:
        self._started: tuple[int, int] | None = None
        self.ended = tuple[int, ...]()
        """The ranks of the newest start that have ended with exit code 0."""
        self._ended_since = 0.0

    def find(self, number: int, world_size: int, starts: Sequence[RankStart]) -> RanksStarted | RanksEnded | None:
        """Return what is to be recorded now about the ranks of round `number`; None if there is nothing new."""
        restarts = max((start.restarts for start in starts), default=0)
        newest = [start for start in starts if start.restarts == restarts]
        ended = ended_ranks(newest, restarts)
        if ended != self.ended:
            self.ended, self._ended_since = ended, time.monotonic()
        if (number, restarts) != self._started:
            if len(newest) < world_size:
                return None
            self._started = number, restarts
            return RanksStarted(round=number, restarts=restarts, world_size=world_size)
        if not ended or len(ended) == len(newest) or time.monotonic() - self._ended_since < _TOGETHER_SECONDS:
            return None
        self._ended_since = float("inf")
        return RanksEnded(ranks=ended)


def ended_ranks(starts: Iterable[RankStart], restarts: int) -> tuple[int, ...]:
    """Return the ranks that have ended with exit code 0, of those that started after a number of restarts."""
    return tuple(sorted(start.rank for start in starts if start.has_ended and start.restarts == restarts))


def describe_ended(ended: Sequence[int]) -> str:
    """Return the end of a failure's description that names ranks which have ended with exit code 0, perhaps empty."""
    return f"; {rank_names(ended)} {'has' if len(ended) == 1 else 'have'} ended with exit code 0" if ended else ""
