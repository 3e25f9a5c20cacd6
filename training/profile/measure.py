"""What each part of a training step costs, measured by doing that part alone, again and again. Runs on every rank.

Ranks do the same number of turns, however long each takes, because steps need all of them; the slowest rank counts.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from training.data.batch_schedule import BatchRequest
from training.data.dataset import ImageDataset
from training.data.loader import Batch, load_batches, load_device_batches, to_device
from training.engine.trainer import Trainer

_MOST_TURNS = 500
# Decoding is measured one image after the other, in this process.
_MOST_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds per step of the slowest rank; None: there is nothing of the kind here."""

    whole: float
    """A step as it is trained, with all that follows."""
    loading: float
    """A batch, from the loader alone: what its workers together need, and what comes from them."""
    decode: float | None
    """Of that, reading and decoding image files, as far as one worker alone does it."""
    augment: float | None
    """Of that, cropping, scaling and augmenting, likewise."""
    copy: float | None
    """A batch to the GPU."""
    compute: float
    """Forward and backward passes and the optimizer, on images that are on the device already."""
    all_reduce: float | None
    """What the same takes longer when the ranks exchange gradients: as far as that is not hidden behind the compute."""


class Meter:
    """Measures the parts of one training."""

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.trainer, self.group, self._seconds = trainer, trainer.group, seconds

    def costs(self) -> Costs:
        """All of them. Every rank must call this."""
        trainer, several = self.trainer, self.group.world_size > 1
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
        pinned = self.group.device.type == "cuda" and trainer.workers > 0
        with load_batches(trainer.data.train, self._requests(), trainer.workers, pin_memory=pinned) as batches:
            loading = self._milliseconds(lambda: next(batches))
            batch = next(batches)
        copied = self.group.device != batch.images.device
        copy = self._milliseconds(lambda: self._on_device(batch)) if copied else None
        ready = self._on_device(batch)
        together = self._milliseconds(lambda: self._step(ready)) if several else None
        with trainer.stepper.wrapped.no_sync():
            compute = self._milliseconds(lambda: self._step(ready))
        with load_device_batches(self.group.device, trainer.data.train, self._requests(), trainer.workers) as batches:
            whole = self._milliseconds(lambda: self._step(next(batches)))
        decode, augment = self._loading_parts(batch)
        exposed = None if together is None else max(0.0, together - compute)
        return Costs(
            whole=whole,
            loading=loading,
            decode=decode,
            augment=augment,
            copy=copy,
            compute=compute,
            all_reduce=exposed,
        )

    def _requests(self) -> Iterator[BatchRequest]:
        return self.trainer.schedule.requests(0, 0, self.group.rank, self.group.world_size)

    def _on_device(self, batch: Batch) -> Batch:
        device = self.group.device
        return batch._replace(images=to_device(batch.images, device), labels=to_device(batch.labels, device))

    def _step(self, batch: Batch) -> None:
        self.trainer.stepper.step(batch, self.trainer.loss_meter)

    def _loading_parts(self, batch: Batch) -> tuple[float | None, float | None]:
        """Decoding and augmenting a rank's share of a step, divided among its workers."""
        source, several = self.trainer.data.train, max(1, self.trainer.workers)
        indices = tuple(batch.indices[:_MOST_IMAGES].tolist())
        scale = len(batch.labels) / len(indices) / several
        made = self._milliseconds(lambda: source[BatchRequest(indices=indices, epoch=0)]) * scale
        if not isinstance(source, ImageDataset):
            return None, made
        store, places = source.store, cycle(indices)
        decoded = self._milliseconds(lambda: store.read(next(places))) * len(batch.labels) / several
        return decoded, max(0.0, made - decoded)

    def _milliseconds(self, act: Callable[[], Any]) -> float:
        """Milliseconds of one turn, the mean of as many as there is time for, on the slowest rank.

        The first turn makes what is made once. If one takes longer than there is time, the second is all.
        """
        for _ in range(2):
            first = self._seconds_of(act, 1)
        turns = int(min(_MOST_TURNS, self._seconds / max(self.group.all_gather_object(first))))
        seconds = self._seconds_of(act, turns) / turns if turns > 1 else first
        return 1000 * float(max(self.group.all_gather_object(seconds)))

    def _seconds_of(self, act: Callable[[], Any], turns: int) -> float:
        self.group.wait_for_device()
        began = time.perf_counter()
        for _ in range(turns):
            act()
        self.group.wait_for_device()
        return time.perf_counter() - began
