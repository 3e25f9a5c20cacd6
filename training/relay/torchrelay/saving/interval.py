"""Says when the next checkpoint or snapshot is due. Runs on every rank; imports no torch."""

import math
import time
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

# Copies to the next node use the network, which the training needs, too, for at most this share of the time.
_SENDING_SHARE = 0.1


def check_numbers(call: str, *, least: int = 0, is_whole: bool = False, **values: Any) -> None:
    """Check numbers that a script gives in a call, such as `state`. Raises ValueError."""
    for name, value in values.items():
        is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
        # No comparison with NaN is True.
        if not (is_number and value >= least):
            kind = "whole number" if is_whole else "number"
            raise ValueError(f"{call}({name}={value!r}): {name} must be a {kind}, {least} or greater")


@dataclass(kw_only=True)
class SaveTimes:
    """The saves of one kind. With neither an interval in steps nor one in seconds, none is due."""

    steps: int | None = None
    seconds: float | None = None
    max_overhead: float | None = None
    """Largest share of the time that saving may take. If saving takes more, the interval grows; None for no limit."""
    _saved: Any = field(default=None, init=False)
    """What `record` was last called with: a step, or more; None if nothing counts as saved."""
    _saved_at: float = field(default_factory=time.monotonic, init=False)

    def record(self, position: Any, *, due: bool = False) -> None:
        """Restart the interval at a save. If `due`, nothing counts as saved, and a time interval as over."""
        self._saved = None if due else position
        self._saved_at = -math.inf if due else time.monotonic()

    def is_saved(self, position: Any) -> bool:
        """Return whether this is the position of the last save. All ranks agree on this."""
        return bool(position == self._saved)

    def due_by_time(self, cost_seconds: float, sending_seconds: float = 0.0) -> bool:
        """Return whether the interval has passed. Since the ranks' clocks differ, act on one rank's answer only.

        Args:
            cost_seconds: what the last save took from the training.
            sending_seconds: for how long it used the network.
        """
        if self.seconds is None:
            return False
        wait = self.seconds
        if self.max_overhead:
            wait = max(wait, cost_seconds / self.max_overhead, sending_seconds / _SENDING_SHARE)
        return time.monotonic() - self._saved_at >= wait

    def due_by_step(self, step: int) -> bool:
        """Return whether a step is a multiple of the interval's steps."""
        return self.steps is not None and step % self.steps == 0

    def due_after(self, step: int) -> bool:
        """Return whether at least the interval's steps are done since the last save."""
        return self.steps is not None and self._saved is not None and step - self._saved >= self.steps
