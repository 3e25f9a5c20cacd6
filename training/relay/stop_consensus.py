"""Lets all ranks act on one rank's request at the same step: a stop signal, a save, a snapshot. Runs on every rank.

A trainer exchanges flags every few steps, a script at each call of `should_stop`.
"""

import math
import time
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# The ranks exchange their flags about this often, and at least once in _MAX_INTERVAL boundaries: when storage stalls,
# steps of milliseconds may take seconds, and a signal should still take effect within the grace period of a preemption.
# An exchange is a ring in which each rank waits for the ranks before it.
_EXCHANGE_SECONDS = 0.05
_MAX_INTERVAL = 5


class StopRequested(Exception):  # noqa: N818  # no error: a request that all ranks agreed on
    """Says that some rank received this signal. All ranks raise it at the same step boundary."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = Signals(number).name


class StepFlags(NamedTuple):
    """A rank's requests at a step boundary. The maximum over the ranks counts."""

    signal: int = 0  # the number of the signal to stop for; 0: none
    save: int = 0  # 1: a checkpoint is due
    snapshot: int = 0  # 1: a snapshot is due
    corrupt_images: int = 0  # 1: this rank found corrupt images that other ranks do not know of
    end: int = 0  # 1: no further step
    interval: int = 0  # boundaries from one exchange to the next; rank 0 sets it


class StopConsensus:
    """Exchanges the flags at step boundaries without delaying the training.

    About every 50 ms, at the same boundaries on all ranks, they start an all-reduce (maximum) of their flags on the
    CPU, and wait for the previous one, which had at least a whole step to finish. So a request takes effect within two
    intervals. If steps take 50 ms or more, an interval is one boundary. If there is no group, this is the only rank,
    and a request takes effect at once.
    """

    def __init__(self, group: "ProcessGroup | None") -> None:
        from torch import distributed

        self._group = group
        self._is_rank_zero = group is None or distributed.get_rank() == 0
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._began = time.monotonic()
        self._boundaries = 0
        """Boundaries since the last exchange."""
        self.interval = 1
        """Boundaries from the last exchange to the next; the same on every rank."""

    def is_due(self) -> bool:
        """Count a step boundary, and return whether the ranks exchange flags at it. Every rank must call this."""
        self._boundaries += 1
        return self._boundaries >= self.interval

    def exchange(self, flags: StepFlags, max_interval: float = math.inf) -> StepFlags:
        """Send this rank's flags, and return the flags agreed on at the previous exchange, the same on every rank.

        Every rank must call this: at a step boundary when `is_due`, in an evaluation before each batch. Rank 0's
        `max_interval` limits the boundaries from the next exchange to the one after it.

        Raises:
            StopRequested: some rank received a signal.
        """
        agreed = flags if self._group is None else self.wait()
        if agreed.signal:
            raise StopRequested(agreed.signal)
        self.interval = agreed.interval or 1
        # What was agreed on happens now. A rank may still request it, but it must not happen twice.
        wanted = StepFlags(*(0 if done else flag for done, flag in zip(agreed, flags, strict=True)))
        self._start(wanted._replace(interval=self._proposed_interval(max_interval)))
        return agreed

    def _proposed_interval(self, max_interval: float) -> int:
        """Return how many boundaries fit between two exchanges, by the time since the last one; 0 except on rank 0."""
        now, boundaries = time.monotonic(), self._boundaries
        fitting = int(_EXCHANGE_SECONDS * boundaries / max(now - self._began, 1e-9))
        self._began, self._boundaries = now, 0
        return max(1, int(min(max_interval, _MAX_INTERVAL, fitting))) if self._is_rank_zero else 0

    def _start(self, wanted: StepFlags) -> None:
        import torch
        from torch import distributed

        if self._group is not None:
            maximum = torch.tensor(wanted)
            work = distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending = maximum, work

    def wait(self) -> StepFlags:
        """Wait for the pending all-reduce, and return its flags; all are 0 if nothing is pending."""
        if self._pending is None:
            return StepFlags()
        maximum, work = self._pending
        self._pending = None
        work.wait()
        return StepFlags(*maximum.tolist())
