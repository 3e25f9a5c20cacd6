"""What has happened since the last line of metrics, kept on the device so that no step waits. Runs on every rank."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc.core.outcome import EXIT_DIVERGED
from training.runtime.process_group import ProcessGroup, SharedError


class DivergedError(SharedError):
    """The loss is not finite any more. Another attempt would come to the same."""

    exit_code = EXIT_DIVERGED

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(f"the loss is {loss} since step {step}: the training has diverged, use a smaller --lr")
        self.loss, self.step = loss, step


class LossMeter:
    """Sums since the last line of metrics: the losses of this rank's images, the images of all, and the time.

    The losses are float32, of similar size, and added up as float64: their sum has no rounding, so it depends neither
    on the number of ranks nor on when a state was saved.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.loss = torch.zeros((), dtype=torch.float64, device=group.device)
        """The sum of the losses of this rank's images."""
        self.images = 0
        """Images of all ranks whose losses are in the sums."""
        self._steps = 0
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=group.device)
        """Steps before the first one with which the sum ceased to be finite: it does not become so again."""
        self._timed_images = 0
        self._started: float | None = None
        self._waited = 0.0
        self._data_wait_share = 0.0
        self._earlier_seconds = 0.0

    def begin_step(self) -> None:
        """A step begins. With the first one the clock starts: getting ready is not training."""
        if self._started is None:
            self._started = time.monotonic()

    def add_wait(self, seconds: float) -> None:
        """Count the time that this rank has waited for a batch; the first one is awaited before the clock starts."""
        if self._started is not None:
            self._waited += seconds

    def add_loss(self, loss: Tensor) -> None:
        """Count the sum (float32) of the losses of some of this rank's images."""
        self.loss += loss.detach()

    def add_images(self, images: int) -> None:
        """Count all ranks' images of a step."""
        self.images += images
        self._timed_images += images
        self._steps += 1
        self._finite_steps += torch.isfinite(self.loss)

    def total_loss(self, step: int) -> float:
        """The sum of the losses of all ranks' images, after so many steps.

        Raises:
            DivergedError: the sum is not finite.
        """
        share = self._waited / max(self._seconds, 1e-9)
        # Together: another message between the ranks would be another wait.
        sums = self._group.all_reduce(torch.stack([self.loss.to("cpu"), torch.tensor(share, dtype=torch.float64)]))
        self._data_wait_share = float(sums[1]) / self._group.world_size
        return self.check(float(sums[0]), step)

    @property
    def data_wait_share(self) -> float:
        """The part of its time that a rank has waited for data, the mean of all ranks, when the loss was last told."""
        return self._data_wait_share

    def check(self, total: float, step: int) -> float:
        """The sum of the losses of all ranks' images, which is finite. Every rank must have the same sum.

        Raises:
            DivergedError: it is not.
        """
        if math.isfinite(total):
            return total
        finite = min(self._group.all_gather_object(int(self._finite_steps)))
        raise DivergedError(total, step - self._steps + finite + 1)

    @property
    def _seconds(self) -> float:
        """Since the last line of metrics, without what was left out."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    @property
    def train_seconds(self) -> float:
        """Since the run began, in steps that led to the present state, without what was left out."""
        return self._earlier_seconds + self._seconds

    def images_per_second(self) -> float:
        """Speed of all ranks together, over the time that was not left out."""
        return self._timed_images / max(self._seconds, 1e-9)

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, which was not for training."""
        if self._started is not None:
            self._started += seconds

    def restart(self) -> None:
        """Begin anew, after a line of metrics."""
        self._earlier_seconds = self.train_seconds
        self._started, self._waited = time.monotonic(), 0.0
        self.loss.zero_()
        self.images = self._timed_images = self._steps = 0
        self._finite_steps.zero_()

    def restore(self, numbers: Mapping[str, Any], *, counts_loss: bool) -> None:
        """Go on from what a saved state had counted; one rank alone counts the losses."""
        self.loss.fill_(numbers["window"]["loss"] if counts_loss else 0.0)
        self.images = numbers["window"]["images"]
        self._earlier_seconds = numbers["accounting"]["train_seconds"]
