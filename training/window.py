"""What has happened since the last line of metrics, kept on the device so that no step waits. Runs on every rank."""

import math
import time

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
        self._loss = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self.images = 0
        """Images of all ranks whose losses are in the sum."""
        self._timed_images = 0
        self._started = time.monotonic()

    def add_loss(self, loss: Tensor) -> None:
        """Count the sum (float32) of the losses of some of this rank's images."""
        self._loss += loss.detach()

    def add_images(self, images: int) -> None:
        """Count all ranks' images of a step."""
        self.images += images
        self._timed_images += images

    def total_loss(self, step: int) -> float:
        """The sum of the losses of all ranks' images; `step` is for the message.

        Raises:
            SharedError: the sum is not finite: the training has diverged.
        """
        loss = float(self._ranks.sum(self._loss))
        if math.isfinite(loss):
            return loss
        raise SharedError(f"the loss is {loss} by step {step}: the training has diverged, use a smaller --lr")

    def images_per_second(self) -> float:
        """Speed of all ranks together, over the time that was not left out."""
        return self._timed_images / max(time.monotonic() - self._started, 1e-9)

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, which was not for training."""
        self._started += seconds

    def restart(self, loss: float = 0.0, images: int = 0) -> None:
        """Begin anew, with what a restored state had already counted (on one rank only)."""
        self._loss.fill_(loss)
        self.images = images
        self._timed_images = 0
        self._started = time.monotonic()
