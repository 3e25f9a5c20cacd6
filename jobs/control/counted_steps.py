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
        self._steps, self._step_seconds = 0, dict[int, float | None]()
        self._reports, self._awaits_end = False, False
        self._after: int | None = None
        self._recorded: int | None = None
        self._recorded_at = 0.0

    @property
    def done(self) -> int | None:
        """The largest count; None if the ranks have counted no step, or if a rank reports its steps itself."""
        return None if self._reports else self._steps or None

    def restart(self, after: int | None = None) -> None:
        """Count from 0 again, as soon as the ranks that count now have ended.

        If ranks that had started after a number of restarts have failed (`after`), torchrun may have replaced them by
        now. So ranks that have started after more restarts count at once.
        """
        self._steps = 0
        self._reports = False
        self._awaits_end = after is None
        self._after = after

    def update(
        self, heartbeats: Collection[RankHeartbeat], starts: Sequence[RankStart], world_size: int
    ) -> FirstStep | None:
        """Take the ranks' counts. Returns an event after the first step since their start."""
        if self._after is not None:
            starts = [start for start in starts if start.restarts > self._after]
            newest = {start.rank for start in starts}
            heartbeats = [heartbeat for heartbeat in heartbeats if heartbeat.rank in newest]
        watched = [heartbeat for heartbeat in heartbeats if heartbeat.phase != UNWATCHED]
        self._awaits_end = self._awaits_end and bool(watched)
        if self._awaits_end:
            return None
        self._reports = self._reports or any(heartbeat.phase != COUNTED for heartbeat in watched)
        counts = [heartbeat.step for heartbeat in watched if heartbeat.phase == COUNTED]
        # The last poll may have missed the last steps of ranks that have ended since.
        if len(starts) == world_size and all(start.has_ended for start in starts):
            counts += [start.counted_steps for start in starts if start.counted_steps is not None]
        before, self._steps = self._steps, max([self._steps, *counts])
        self._step_seconds |= {heartbeat.rank: heartbeat.step_seconds for heartbeat in watched}
        return FirstStep(step=self._steps) if self.done and not before else None

    def to_record(self) -> dict[str, Any] | None:
        """Return what `hpc status` must learn now; None if it knows the count, or learned one less than 2 s ago."""
        if self.done in {None, self._recorded} or time.monotonic() - self._recorded_at < _RECORD_SECONDS:
            return None
        self._recorded, self._recorded_at = self.done, time.monotonic()
        paces = [seconds for seconds in self._step_seconds.values() if seconds]
        return {"time": time.time(), "steps": self.done, "step_seconds": max(paces, default=None)}
