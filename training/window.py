"""What has happened since the last line of metrics, kept on the device so that no step waits. Runs on every rank."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from training.distributed import Ranks, SharedError


class Window:
    """Sums since the last line of metrics: the losses of this rank's images, the images of all, and the time.

    The losses are float32, of similar size, and added up as float64: their sum has no rounding, so it depends neither
    on the number of ranks nor on when a state was saved.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.loss = torch.zeros((), dtype=torch.float64, device=ranks.device)
        """The sum of the losses of this rank's images."""
        self.images = 0
        """Images of all ranks whose losses are in the sums."""
        self._timed_images = 0
        self._started: float | None = None
        self._earlier_seconds = 0.0

    def begin_step(self) -> None:
        """A step begins. With the first one the clock starts: getting ready is not training."""
        if self._started is None:
            self._started = time.monotonic()

    def add_loss(self, loss: Tensor) -> None:
        """Count the sum (float32) of the losses of some of this rank's images."""
        self.loss += loss.detach()

    def add_images(self, images: int) -> None:
        """Count all ranks' images of a step."""
        self.images += images
        self._timed_images += images

    def total_loss(self, step: int) -> float:
        """The sum of the losses of all ranks' images; `step` is for the message.

        Raises:
            SharedError: the sum is not finite: the training has diverged.
        """
        return finite(float(self._ranks.sum(self.loss)), step)

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
        self._started = time.monotonic()
        self.loss.zero_()
        self.images = self._timed_images = 0

    def restore(self, numbers: Mapping[str, Any], *, counts_loss: bool) -> None:
        """Go on from what a saved state had counted; one rank alone counts the losses."""
        self.loss.fill_(numbers["window"]["loss"] if counts_loss else 0.0)
        self.images = numbers["window"]["images"]
        self._earlier_seconds = numbers["accounting"]["train_seconds"]


def finite(loss: float, step: int) -> float:
    """The sum of losses, which is finite.

    Raises:
        SharedError: it is not: the training has diverged. Every rank must have the same sum.
    """
    if math.isfinite(loss):
        return loss
    raise SharedError(f"the loss is {loss} by step {step}: the training has diverged, use a smaller --lr")
