"""How all ranks come to act on one rank's wish at the same step. Runs on every rank."""

from signal import Signals
from typing import NamedTuple

import torch
from torch import Tensor, distributed


class StopRequested(Exception):  # noqa: N818  # no error: a wish that all ranks have agreed to fulfil
    """All ranks know that one of them was sent this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = Signals(number).name


class StepFlags(NamedTuple):
    """What ranks may want at a step boundary. The largest of each counts."""

    signal: int = 0
    """The number of a signal to stop for; 0: go on."""
    save: int = 0
    """1: a checkpoint is due."""
    snapshot: int = 0
    """1: a snapshot is due."""
    news: int = 0
    """1: there is something to tell the other ranks."""
    end: int = 0
    """1: no step is to follow."""


class StopConsensus:
    """An exchange of wishes at every step boundary that costs the training nothing.

    At each boundary the ranks start an all-reduce (the largest counts) of their wishes on the CPU, and wait for that
    of the boundary before, which has had a whole step to finish. So a wish comes true one step later.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, distributed.Work] | None = None

    def exchange(self, wishes: StepFlags) -> StepFlags:
        """State one's wishes and learn what was agreed on at the last boundary: the same on every rank.

        Raises:
            StopRequested: some rank was sent a signal.
        """
        agreed = self.settle()
        # What is agreed on is done now: who asks for it at this boundary still means the same, and gets it once.
        wish = torch.tensor([0 if done else wanted for done, wanted in zip(agreed, wishes, strict=True)])
        work = distributed.all_reduce(wish, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (wish, work)
        if agreed.signal:
            raise StopRequested(agreed.signal)
        return agreed

    def settle(self) -> StepFlags:
        """Wait for what is under way, and return the largest wishes."""
        if self._pending is None:
            return StepFlags()
        wish, work = self._pending
        self._pending = None
        work.wait()
        return StepFlags(*wish.tolist())
