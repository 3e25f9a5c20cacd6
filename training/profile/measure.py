"""Measures the parts of a training step, each by repeating it alone. Runs on every rank.

All ranks repeat a part equally often, because steps need all of them; the time of the slowest rank counts.
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

_MAX_REPETITIONS = 500
# Of a batch, for decoding and augmenting in this process.
_MAX_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds per step of the slowest rank; None: the training has no such part."""

    step: float
    """A complete step."""
    loading: float
    """A batch from all loader workers together, without training."""
    decode: float | None
    """Reading and decoding the images of a batch, divided by the workers; a part of `loading`."""
    augment: float | None
    """Cropping, scaling and augmenting them, likewise."""
    copy: float | None
    """Copying a batch to the GPU."""
    compute: float
    """Forward and backward passes and the optimizer, on images that are already on the device."""
    all_reduce: float | None
    """What the all-reduce of gradients adds to `compute`: the part that does not overlap with it."""


class Meter:
    """Measures the parts of one training."""

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.trainer, self.group, self._seconds = trainer, trainer.group, seconds

    def costs(self) -> Costs:
        """Measure all parts. Every rank must call this."""
        trainer, device = self.trainer, self.group.device
        source, workers = trainer.data.train, trainer.workers
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
        pin_memory = device.type == "cuda" and workers > 0
        with load_batches(source, self._requests(), workers, pin_memory=pin_memory) as batches:
            loading = self._milliseconds(lambda: next(batches))
            batch = next(batches)
        copy = self._milliseconds(lambda: self._on_device(batch)) if device != batch.images.device else None
        ready = self._on_device(batch)
        synchronised = self._milliseconds(lambda: self._step(ready)) if self.group.world_size > 1 else None
        with trainer.stepper.wrapped.no_sync():
            compute = self._milliseconds(lambda: self._step(ready))
        with load_device_batches(device, source, self._requests(), workers) as batches:
            step = self._milliseconds(lambda: self._step(next(batches)))
        decode, augment = self._loading_parts(batch)
        return Costs(
            step=step,
            loading=loading,
            decode=decode,
            augment=augment,
            copy=copy,
            compute=compute,
            all_reduce=None if synchronised is None else max(0.0, synchronised - compute),
        )

    def _requests(self) -> Iterator[BatchRequest]:
        return self.trainer.schedule.requests(0, 0, self.group.rank, self.group.world_size)

    def _on_device(self, batch: Batch) -> Batch:
        device = self.group.device
        return batch._replace(images=to_device(batch.images, device), labels=to_device(batch.labels, device))

    def _step(self, batch: Batch) -> None:
        self.trainer.stepper.step(batch, self.trainer.loss_meter)

    def _loading_parts(self, batch: Batch) -> tuple[float | None, float | None]:
        """Decoding and augmenting a rank's share of a batch, divided by its workers."""
        source, workers = self.trainer.data.train, max(1, self.trainer.workers)
        indices = tuple(batch.indices[:_MAX_IMAGES].tolist())
        scale = len(batch.labels) / len(indices) / workers
        both = self._milliseconds(lambda: source[BatchRequest(indices=indices, epoch=0)]) * scale
        if not isinstance(source, ImageDataset):
            return None, both
        store, index = source.store, cycle(indices)
        decode = self._milliseconds(lambda: store.read(next(index))) * len(batch.labels) / workers
        return decode, max(0.0, both - decode)

    def _milliseconds(self, work: Callable[[], Any]) -> float:
        """Milliseconds of one repetition on the slowest rank: the mean of those that fit into the given seconds.

        The first repetition does not count, for it builds what later ones reuse.
        """
        for _ in range(2):
            once = self._total_seconds(work, 1)
        repetitions = int(min(_MAX_REPETITIONS, self._seconds / max(self.group.all_gather_object(once))))
        seconds = self._total_seconds(work, repetitions) / repetitions if repetitions > 1 else once
        return 1000 * float(max(self.group.all_gather_object(seconds)))

    def _total_seconds(self, work: Callable[[], Any], repetitions: int) -> float:
        self.group.wait_for_device()
        began = time.perf_counter()
        for _ in range(repetitions):
            work()
        self.group.wait_for_device()
        return time.perf_counter() - began
