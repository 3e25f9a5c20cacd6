"""Lets all ranks act at the same step on one rank's request, such as to stop or to save. Runs on every rank.

The trainer exchanges flags every few steps. A script exchanges flags at each call of `should_stop`.
"""

import math
import time
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# The ranks exchange flags only about this often, because in an exchange each rank waits for the ranks before it in a
# ring. An exchange follows after at most _MAX_INTERVAL boundaries: if storage stalls, steps of milliseconds may take
# seconds, and a signal should still take effect within the grace period of a preemption.
_EXCHANGE_SECONDS = 0.05
_MAX_INTERVAL = 5


class StopRequested(Exception):  # noqa: N818  # a request that all ranks agreed on, not an error
    """Raised on all ranks at the same step boundary, after a rank received a stop signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = Signals(number).name


class StepFlags(NamedTuple):
    """The requests of a rank at a step boundary. All ranks act on the maximum of each field over the ranks."""

    signal: int = 0  # number of the signal to stop for, or 0
    save: int = 0  # 1 if a checkpoint is due
    snapshot: int = 0  # 1 if a snapshot is due
    end: int = 0  # 1 if the training must end after this step
    interval: int = 0  # boundaries from one exchange to the next; rank 0 sets it


class StopConsensus:
    """Exchanges the flags at step boundaries without delaying the training.

    About every 50 ms, at the same boundary, all ranks start an all-reduce (maximum) of their flags on the CPU, and wait
    for the previous all-reduce, which had at least a whole step to finish. So a request takes effect within two
    intervals. If steps take 50 ms or more, an interval is one boundary. A single rank has no group, and its requests
    take effect at once.
    """

    def __init__(self, group: "ProcessGroup | None") -> None:
        from torch import distributed

        self._group = group
        self._is_rank_zero = group is None or distributed.get_rank() == 0
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._began = time.monotonic()
        self._boundaries = 0
        """Number of boundaries since the last exchange."""
        self.interval = 1
        """Number of boundaries from the last exchange to the next one, the same on every rank."""

    def is_due(self) -> bool:
        """Count a step boundary, and return whether the ranks exchange flags at it. Every rank must call this."""
        self._boundaries += 1
        return self._boundaries >= self.interval

    def exchange(self, flags: StepFlags, max_interval: float = math.inf) -> StepFlags:
        """Send this rank's flags, and return the flags that all ranks agreed on at the previous exchange.

        Every rank must call this: at each step boundary where `is_due` returned True, and before each batch of an
        evaluation. On rank 0, `max_interval` limits the boundaries from the next exchange to the one after it. Raises
        StopRequested if a rank received a signal.
        """
        agreed = flags if self._group is None else self.wait()
        if agreed.signal:
            raise StopRequested(agreed.signal)
        self.interval = agreed.interval or 1
        # The ranks now do what they agreed on. A rank that still requests it must not make them do it twice.
        wanted = StepFlags(*(0 if done else flag for done, flag in zip(agreed, flags, strict=True)))
        self._start(wanted._replace(interval=self._proposed_interval(max_interval)))
        return agreed

    def _proposed_interval(self, max_interval: float) -> int:
        """Return how many boundaries take 50 ms, judged by the last interval; 0 on ranks other than 0."""
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
        """Wait for the pending all-reduce, and return its flags, or zeros if none is pending."""
        if self._pending is None:
            return StepFlags()
        maximum, work = self._pending
        self._pending = None
        work.wait()
        return StepFlags(*maximum.tolist())
