"""Decides from seed and step alone which images a step has, and which of them a rank takes. Runs on every rank.

Global batches define the optimization. With batch size B, step s of an epoch has the images [s * B, (s + 1) * B) of
the epoch's order. The last images, fewer than B, are left out; each epoch leaves out others. A training set smaller
than B is one batch. Ranks take consecutive ranges of a batch, whose sizes differ by at most one image, or by one pair
with mixup or cutmix.

Repeated augmentation (Hoffer et al., "Augment your batch", 2020) makes R samples of an image, augmented differently,
all in one batch if R divides B. As in torchvision's references, an epoch keeps its number of samples, so it uses only
one image in R; each epoch uses others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from training.runtime.counter_rng import Purpose, derive_key, permutation


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A rank's request for some samples of a data set, and their augmentation."""

    indices: tuple[int, ...]
    """Numbers of the samples. In a data set of n images, sample i + n * r is repetition r (from 0) of image i."""
    epoch: int | None
    """Epoch whose augmentation the images get; None for no augmentation."""


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batches of all steps of a run. `batch_size` counts the images of all ranks."""

    samples: int
    batch_size: int
    epochs: int
    seed: int
    samples_per_group: int = 1
    """Number of consecutive images that go to the same rank: 2 with mixup or cutmix, which mix pairs, else 1."""
    repetitions: int = 1
    """Number of samples of each used image in an epoch."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in an epoch."""
        return self.samples // self.batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that an epoch uses."""
        return self.steps_per_epoch * self.batch_size

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in the run."""
        return self.steps_per_epoch * self.epochs

    def order(self, epoch: int) -> Tensor:
        """Return an epoch's samples in order, by their numbers in `BatchRequest`. No batch uses the last few."""
        images = permutation(derive_key(self.seed, Purpose.ORDER, epoch), self.samples)
        if self.repetitions == 1:
            return images
        places = torch.arange(self.samples_per_epoch)
        batch, repetition = places // self.batch_size, places % self.repetitions
        # A batch has each image once, then each again, so that neighbors, which mixup mixes, are different images.
        places = torch.argsort(batch * self.repetitions + repetition, stable=True)
        return images[places // self.repetitions] + places % self.repetitions * self.samples

    def batch(self, step: int) -> list[int]:
        """Return the indices of the images in a step's batch, repeated ones several times. Steps count from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        start = place * self.batch_size
        return (self.order(epoch)[start : start + self.batch_size] % self.samples).tolist()

    def requests(self, epoch: int, samples_seen: int, rank: int, world_size: int) -> Iterator[BatchRequest]:
        """Yield a rank's part of each batch of the run, from sample `samples_seen` of `epoch` on."""
        start, end = split_range(self.batch_size, rank, world_size, self.samples_per_group)
        while epoch < self.epochs:
            order = self.order(epoch)
            for offset in range(samples_seen, self.samples_per_epoch, self.batch_size):
                yield BatchRequest(indices=tuple(order[offset + start : offset + end].tolist()), epoch=epoch)
            epoch, samples_seen = epoch + 1, 0


def split_range(total: int, part: int, parts: int, samples_per_group: int = 1) -> tuple[int, int]:
    """Return start and end of range number `part` of `parts` consecutive ranges that cover `total` samples.

    Lengths differ by at most one group of `samples_per_group`. The last group may be incomplete.
    """
    groups = -(-total // samples_per_group)
    start, end = groups * part // parts, groups * (part + 1) // parts
    return start * samples_per_group, min(end * samples_per_group, total)


def evaluation_requests(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[BatchRequest]:
    """Yield a rank's batches of an evaluation: batch i has the samples from i * `batch_size` on, for any world size.

    The last bits of an image's result can depend on the other images in its batch, so fixed batches make results
    independent of the number of ranks. Ranks take batches in turn. Every rank gets the same number of requests, so that
    ranks can communicate between two requests; the last one may be empty.
    """
    for first in range(0, samples, batch_size * world_size):
        start = min(first + rank * batch_size, samples)
        yield BatchRequest(indices=tuple(range(start, min(start + batch_size, samples))), epoch=None)
