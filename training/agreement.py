"""How all ranks come to act on one rank's wish at the same step. Runs on every rank."""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know that all others know too."""

    signal: int = 0
    """The number of a signal to stop for; 0: go on."""
    save: bool = False
    """Whether a checkpoint is due."""


class Agreement:
    """An exchange of wishes at every step boundary that costs the training nothing.

    At each boundary the ranks start an all-reduce (the largest counts) of their wishes on the CPU, and wait for that
    of the boundary before, which has had a whole step to finish. So a wish comes true one step later.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, distributed.Work] | None = None

    def exchange(self, *, signal: int, save: bool = False) -> Agreed:
        """State one's wish and learn what was agreed on at the last boundary: the same on every rank."""
        agreed = self.settle()
        wish = torch.tensor([signal, int(save)])
        work = distributed.all_reduce(wish, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (wish, work)
        return agreed

    def settle(self) -> Agreed:
        """Wait for what is under way, and learn what it says."""
        if self._pending is None:
            return Agreed()
        wish, work = self._pending
        self._pending = None
        work.wait()
        signal, save = wish.tolist()
        return Agreed(signal=signal, save=bool(save))
