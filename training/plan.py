"""Which images are in which step, and which of them a rank takes: pure functions of the seed and of counters.

Runs on every rank. The optimisation is defined by global batches. Step s of an epoch has the images
[s * B, (s + 1) * B) of the epoch's order; the rest, fewer than B, is left out (each epoch leaves out others). If
the whole training set is smaller than B, it is the batch. Ranks take consecutive shares of a batch, whose sizes
differ by one at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from training.counted import Purpose, permutation, stream


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rank asks a data source for: some of its images, and how to augment them."""

    indices: tuple[int, ...]
    epoch: int | None
    """Images are augmented as in this epoch; None: they are not augmented."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of a whole run. `batch_size` is global."""

    samples: int
    batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self.samples // self.batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Images that an epoch uses."""
        return self.steps_per_epoch * self.batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps_per_epoch * self.epochs

    def order(self, epoch: int) -> Tensor:
        """The order of all images in an epoch."""
        return permutation(stream(self.seed, Purpose.ORDER, epoch), self.samples)

    def requests(self, epoch: int, samples_seen: int, rank: int, world_size: int) -> Iterator[Request]:
        """A rank's shares of the batches of all steps from a position in the data on, to the end of the run."""
        start, end = share(self.batch_size, rank, world_size)
        while epoch < self.epochs:
            order = self.order(epoch)
            for offset in range(samples_seen, self.samples_per_epoch, self.batch_size):
                yield Request(indices=tuple(order[offset + start : offset + end].tolist()), epoch=epoch)
            epoch, samples_seen = epoch + 1, 0


def make_plan(samples: int, batch_size: int, epochs: int, seed: int) -> Plan:
    """A plan whose batch is no larger than the training set."""
    return Plan(samples=samples, batch_size=min(batch_size, samples), epochs=epochs, seed=seed)


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's part of `total` things in a row. Parts differ by one at most and cover all."""
    return total * rank // world_size, total * (rank + 1) // world_size


def evaluation_requests(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[Request]:
    """A rank's part of the samples, each of which is asked for exactly once by all ranks together.

    Every rank gets the same number of requests, so that the ranks can talk between two of them; some may be empty.
    `batch_size` is the largest size of one rank's request.
    """
    start, end = share(samples, rank, world_size)
    largest_part = -(-samples // world_size)
    rounds = -(-largest_part // batch_size)
    for turn in range(rounds):
        first, last = share(end - start, turn, rounds)
        yield Request(indices=tuple(range(start + first, start + last)), epoch=None)
