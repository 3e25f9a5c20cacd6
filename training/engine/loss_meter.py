"""Loss, accuracy, images and time since the last line of metrics. Runs on every rank; sums stay on the device."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from hpc.core.causes import EXIT_DIVERGED
from training.runtime.process_group import ProcessGroup, SharedError


class DivergedError(SharedError):
    """The loss is not finite. Another attempt would diverge too."""

    exit_code = EXIT_DIVERGED

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(f"the loss is {loss} since step {step}: the training has diverged, use a smaller --lr")
        self.loss, self.step = loss, step


class LossMeter:
    """Sums since the last line of metrics, and the time.

    Losses and correct predictions are those of this rank's images; images and steps are those of all ranks. The losses
    are float32 numbers of similar size. Summed as float64 they are not rounded, so the sum depends neither on the
    number of ranks nor on when a state was saved. A part of the training's state.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.loss = torch.zeros((), dtype=torch.float64, device=group.device)
        self.correct = torch.zeros((), dtype=torch.float64, device=group.device)
        self.images = 0
        self._steps = 0
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=group.device)
        """Steps with a finite sum: once it is not finite, it stays so."""
        self._timed_images = 0
        self._started: float | None = None
        self._waited = 0.0
        self.data_wait_share = 0.0
        """The share of the time that ranks waited for data, the mean of all ranks, as of the last `total_loss`."""
        self.accuracy = 0.0
        """The share of all ranks' images that were predicted correctly, as of the last `total_loss`."""
        self._earlier_seconds = 0.0

    def begin_step(self) -> None:
        """Begin a step. The clock starts with the first one: the start of a process is not training time."""
        if self._started is None:
            self._started = time.monotonic()

    def add_wait(self, seconds: float) -> None:
        """Count time that this rank has waited for a batch; the wait for the first batch precedes the clock."""
        if self._started is not None:
            self._waited += seconds

    def add(self, loss: Tensor, correct: Tensor) -> None:
        """Add some of this rank's images: the sum (float32) of their losses, how many were predicted correctly."""
        self.loss += loss.detach()
        self.correct += correct

    def add_images(self, images: int) -> None:
        """Count a step with this many images on all ranks."""
        self.images += images
        self._timed_images += images
        self._steps += 1
        self._finite_steps += torch.isfinite(self.loss)

    def total_loss(self, step: int) -> float:
        """The sum of the losses of all ranks' images after step `step`. All ranks must call this.

        Raises:
            DivergedError: the sum is not finite.
        """
        share = self._waited / max(self._seconds, 1e-9)
        # One all-reduce for all: each one waits for all ranks.
        shares = torch.tensor([share], dtype=torch.float64)
        sums = self._group.all_reduce(torch.cat([torch.stack([self.loss, self.correct]).to("cpu"), shares]))
        total, correct, waited = map(float, sums)
        self.data_wait_share, self.accuracy = waited / self._group.world_size, correct / max(self.images, 1)
        if not math.isfinite(total):
            finite_steps = min(self._group.all_gather_json(int(self._finite_steps)))
            raise DivergedError(total, step - self._steps + finite_steps + 1)
        return total

    @property
    def _seconds(self) -> float:
        """Training time since the last line of metrics."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    @property
    def train_seconds(self) -> float:
        """Training time of all steps that led to the present state, by all attempts."""
        return self._earlier_seconds + self._seconds

    def images_per_second(self) -> float:
        """Images of all ranks per second of training time."""
        return self._timed_images / max(self._seconds, 1e-9)

    def leave_out(self, seconds: float) -> None:
        """Do not count this time as training time."""
        if self._started is not None:
            self._started += seconds

    def restart(self) -> None:
        """Reset the sums, after a line of metrics."""
        self._earlier_seconds = self.train_seconds
        self._started, self._waited = time.monotonic(), 0.0
        self.loss.zero_()
        self.correct.zero_()
        self.images = self._timed_images = self._steps = 0
        self._finite_steps.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The sums of all ranks, on the device, and counts. All ranks must call this; no host waits for it."""
        loss, correct = self._group.all_reduce_on_device(torch.stack([self.loss, self.correct]))
        sums = {"loss": loss.clone(), "correct": correct.clone()}
        return {**sums, "images": self.images, "train_seconds": self.train_seconds}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a saved state. The saved sums are those of all ranks: rank 0 alone counts them."""
        for name, mine in (("loss", self.loss), ("correct", self.correct)):
            mine.copy_(state_dict[name] if self._group.is_rank_zero else torch.zeros(()))
        self.images, self._earlier_seconds = state_dict["images"], state_dict["train_seconds"]
