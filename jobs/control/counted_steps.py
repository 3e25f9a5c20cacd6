"""Follows the optimizer steps that the ranks of a script count, if it reports none. Runs in the first node's agent.

Each start of the ranks counts from 0, because nobody knows from which step the script continues: it may restore a
checkpoint of its own. So a count is never the step of a failure, which decides whether the run goes on. A count says
what an interruption costs at most, and `hpc status` shows it.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

from hpc.run.events.kinds import FirstStep
from jobs.control.messages import RankHeartbeat, RankStart
from jobs.control.rank_health import COUNTED, UNWATCHED

# Less often than the agents poll: each record is a file on shared storage.
_RECORD_SECONDS = 2.0


class CountedSteps:
    """The steps that the ranks have done since their last start."""

    def __init__(self) -> None:
        self._start = 0, 0
        """The round, and how often the ranks had restarted together in it."""
        self._steps, self._step_seconds = 0, dict[int, float | None]()
        self.is_reported = False
        """Whether a rank reports its steps itself."""
        self._recorded: int | None = None
        self._recorded_at = 0.0

    @property
    def done(self) -> int | None:
        """The largest count; None if the ranks have counted no step, or if a rank reports its steps itself."""
        return None if self.is_reported else self._steps or None

    def update(
        self, number: int, heartbeats: Collection[RankHeartbeat], starts: Sequence[RankStart], world_size: int
    ) -> FirstStep | None:
        """Take the counts of the ranks in round `number`. Returns an event after the first step since their start."""
        newest = max([(number, start.restarts) for start in starts], default=max(self._start, (number, 0)))
        if newest != self._start:
            self._start, self._steps, self.is_reported = newest, 0, False
        starts = [start for start in starts if (number, start.restarts) == newest]
        ranks = {start.rank for start in starts}
        watched = [beat for beat in heartbeats if beat.rank in ranks and beat.phase != UNWATCHED]
        self.is_reported |= any(beat.phase != COUNTED for beat in watched)
        counts = [beat.step for beat in watched if beat.phase == COUNTED]
        # The last poll may have missed the last steps of ranks that have ended since.
        if len(starts) == world_size and all(start.has_ended for start in starts):
            counts += [start.counted_steps for start in starts if start.counted_steps is not None]
        before, self._steps = self._steps, max([self._steps, *counts])
        self._step_seconds |= {beat.rank: beat.step_seconds for beat in watched}
        return FirstStep(step=self._steps) if self.done and not before else None

    def to_record(self) -> dict[str, Any] | None:
        """Return what `hpc status` must learn now; None if it knows the count, or learned one less than 2 s ago."""
        if self.done in {None, self._recorded} or time.monotonic() - self._recorded_at < _RECORD_SECONDS:
            return None
        self._recorded, self._recorded_at = self.done, time.monotonic()
        paces = [seconds for seconds in self._step_seconds.values() if seconds]
        return {"time": time.time(), "steps": self.done, "step_seconds": max(paces, default=None)}
