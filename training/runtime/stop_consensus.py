"""How all ranks act on one rank's request at the same step: a stop signal, a save, a snapshot. Runs on every rank.

`training.runtime.signals` receives the signal, `Trainer.save_and_stop` saves the step that the ranks agreed on.
"""

from signal import Signals
from typing import NamedTuple

import torch
from torch import Tensor, distributed


class StopRequested(Exception):  # noqa: N818  # no error: a request that all ranks agreed on
    """All ranks know that one of them received this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = Signals(number).name


class StepFlags(NamedTuple):
    """What a rank requests at a step boundary. The maximum over the ranks counts."""

    signal: int = 0  # the number of the signal to stop for; 0: none
    save: int = 0  # 1: a checkpoint is due
    snapshot: int = 0  # 1: a snapshot is due
    corrupt_images: int = 0  # 1: this rank found corrupt images that other ranks do not know of
    end: int = 0  # 1: no further step


class StopConsensus:
    """Exchanges the flags at every step boundary without delaying the training.

    At each boundary the ranks start an all-reduce (maximum) of their flags on the CPU, and wait for the one of the
    previous boundary, which had a whole step to finish. So a request takes effect one step later.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, distributed.Work] | None = None

    def exchange(self, flags: StepFlags) -> StepFlags:
        """Send this rank's flags, and return those agreed on at the previous boundary: the same on every rank.

        Raises:
            StopRequested: some rank received a signal.
        """
        agreed = self.wait()
        # What was agreed on happens now. A rank that still requests it means the same: it must not happen twice.
        maximum = torch.tensor([0 if done else wanted for done, wanted in zip(agreed, flags, strict=True)])
        work = distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (maximum, work)
        if agreed.signal:
            raise StopRequested(agreed.signal)
        return agreed

    def wait(self) -> StepFlags:
        """Wait for the pending all-reduce, and return its flags."""
        if self._pending is None:
            return StepFlags()
        maximum, work = self._pending
        self._pending = None
        work.wait()
        return StepFlags(*maximum.tolist())
