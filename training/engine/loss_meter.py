"""Measures loss, accuracy, images and time since the last line of metrics. Runs on every rank.

Sums stay on the device. The host reads the sums of a logged step while the device computes the next step, so the device
is never idle.
"""

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpc.base.errors import EXIT_DIVERGED, TorchrelayError
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import HostValues


class DivergedError(TorchrelayError):
    """Raised on every rank if the loss is not finite."""

    exit_code = EXIT_DIVERGED

    def __init__(self, loss: float, step: int, rank: int | None) -> None:
        super().__init__(f"the loss is {loss} since step {step}: the training has diverged, use a smaller --lr")
        self.loss, self.step, self.rank = loss, step, rank
        """`rank` was the first with such a loss; None if several were."""


class Means(NamedTuple):
    """Means since the last line of metrics, over the images of all ranks or over the ranks."""

    loss: float
    accuracy: float
    """Share of all ranks' images that were predicted correctly."""
    data_wait_share: float
    """Share of the training time for which a rank waited for data, on average over the ranks."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The sums over all ranks from the last line of metrics to step `step`. The device may still be computing them."""

    step: int
    values: HostValues
    """The sums, over all ranks, of losses, of correct predictions, and of each rank's `data_wait_share`."""
    images: int
    steps: int
    finite_steps: Tensor
    """Number of this rank's steps with a finite sum of losses (int64)."""
    group: ProcessGroup

    def means(self) -> Means | None:
        """Wait for the device, and return the means, or None if the loss is not finite. Any thread may call this."""
        loss, correct, waited = self.values.read()
        if not math.isfinite(loss):
            return None
        images = max(self.images, 1)
        return Means(loss / images, correct / images, waited / self.group.world_size)

    def check(self) -> None:
        """Wait for the device, and raise DivergedError if the loss is not finite. All ranks must call this."""
        loss = self.values.read()[0]
        if not math.isfinite(loss):
            finite_steps = self.group.all_gather_json(int(self.finite_steps))
            first = [rank for rank, steps in enumerate(finite_steps) if steps == min(finite_steps)]
            step = self.step - self.steps + min(finite_steps) + 1
            raise DivergedError(loss, step, first[0] if len(first) == 1 else None)


class LossMeter:
    """Sums losses, correct predictions, images and training time since the last line of metrics.

    Losses and correct predictions are this rank's own; images and steps count for all ranks. The losses are float32
    numbers of similar size, so a sum in float64 is exact, and depends neither on the number of ranks nor on when a
    state was saved. The sums are saved with the training's state.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.loss = torch.zeros((), dtype=torch.float64, device=group.device)
        self.correct = torch.zeros((), dtype=torch.float64, device=group.device)
        self.images = 0
        self._steps = 0
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=group.device)
        """Number of steps with a finite sum of losses. A sum that is not finite stays so."""
        self._timed_images = 0
        self._started: float | None = None
        self._waited = 0.0
        self._earlier_seconds = 0.0

    def begin_step(self, waited_seconds: float) -> None:
        """Add the seconds for which this rank has waited for a batch. The first step only starts the clock.

        The start of the process is not training time.
        """
        if self._started is None:
            self._started = time.monotonic()
        else:
            self._waited += waited_seconds

    def add(self, loss: Tensor, correct: Tensor) -> None:
        """Add a micro-batch: the sum (float32) of its losses, and the number of images predicted correctly."""
        self.loss += loss.detach()
        self.correct += correct

    def add_images(self, images: int) -> None:
        """Count a step that used this many images on all ranks together."""
        self.images += images
        self._timed_images += images
        self._steps += 1
        self._finite_steps += torch.isfinite(self.loss)

    def totals(self, step: int) -> Totals:
        """Return all ranks' sums up to step `step`. All ranks must call this; the host does not wait for the sums."""
        waited = torch.full_like(self.loss, self._waited / max(self._seconds, 1e-9))
        # Use one all-reduce for all sums, because each all-reduce waits for all ranks.
        sums = self._group.all_reduce_on_device(torch.stack([self.loss, self.correct, waited]))
        return Totals(
            step=step,
            values=HostValues(sums),
            images=self.images,
            steps=self._steps,
            finite_steps=self._finite_steps.clone(),
            group=self._group,
        )

    @property
    def _seconds(self) -> float:
        """Seconds of training time since the last line of metrics."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    @property
    def train_seconds(self) -> float:
        """Seconds of training time, over all attempts, of the steps that led to the present state."""
        return self._earlier_seconds + self._seconds

    def images_per_second(self) -> float:
        """Return all ranks' images per second of training time."""
        return self._timed_images / max(self._seconds, 1e-9)

    def leave_out(self, seconds: float) -> None:
        """Exclude these seconds from the training time."""
        if self._started is not None:
            self._started += seconds

    def restart(self) -> None:
        """Reset the sums, after a line of metrics."""
        self._earlier_seconds = self.train_seconds
        self._started = time.monotonic()
        self._waited = 0.0
        # Multiply by 0 instead of clearing: a loss that is not finite stays so, and no state is saved from here on.
        self.loss.mul_(0)
        self.correct.zero_()
        self.images = self._timed_images = self._steps = 0
        self._finite_steps.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' sums (on the device) and counts. All ranks must call this; the host does not wait."""
        loss, correct = self._group.all_reduce_on_device(torch.stack([self.loss, self.correct]))
        sums = {"loss": loss.clone(), "correct": correct.clone()}
        return {**sums, "images": self.images, "train_seconds": self.train_seconds}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a saved state. Its sums are over all ranks, so rank 0 takes them, and other ranks take 0."""
        for name, mine in (("loss", self.loss), ("correct", self.correct)):
            mine.copy_(state_dict[name] if self._group.is_rank_zero else torch.zeros(()))
        self.images = state_dict["images"]
        self._earlier_seconds = state_dict["train_seconds"]
