"""How all ranks come to act on one rank's wish at the same step. Runs on every rank."""

from signal import Signals

import torch
from torch import Tensor, distributed


class StopRequested(Exception):  # noqa: N818  # no error: a wish that all ranks have agreed to fulfil
    """All ranks know that one of them was sent this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = Signals(number).name


class Agreement:
    """An exchange of wishes at every step boundary that costs the training nothing.

    At each boundary the ranks start an all-reduce (the largest counts) of their wishes on the CPU, and wait for that
    of the boundary before, which has had a whole step to finish. So a wish comes true one step later.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, distributed.Work] | None = None

    def exchange(self, *, signal: int, save: bool = False) -> bool:
        """State one's wishes and learn what was agreed on at the last boundary: the same on every rank.

        Args:
            signal: the number of a signal to stop for; 0: go on.
            save: whether a checkpoint is due.

        Returns:
            Whether a checkpoint is due.

        Raises:
            StopRequested: some rank was sent a signal.
        """
        agreed_signal, agreed_save = self.settle()
        wish = torch.tensor([signal, int(save)])
        work = distributed.all_reduce(wish, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (wish, work)
        if agreed_signal:
            raise StopRequested(agreed_signal)
        return bool(agreed_save)

    def settle(self) -> tuple[int, int]:
        """Wait for what is under way, and return the largest wishes."""
        if self._pending is None:
            return 0, 0
        wish, work = self._pending
        self._pending = None
        work.wait()
        signal, save = wish.tolist()
        return signal, save
