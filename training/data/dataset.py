"""What a rank can ask for images and labels by index, and the loader that asks ahead.

Runs on every rank. A source is indexed with a `Request`, so one call makes one rank's part of a batch, wherever it
is made: in the rank or in a loader worker. No source has random numbers of its own.
"""

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from training.data.batch_schedule import BatchRequest
from training.data.to_device import prefetch_to_device, to_device
from training.data.transforms.augment import Augmentation, ImageAugmentation
from training.runtime.process_group import SharedError
from training.runtime.signals import die_with_parent

_MAX_NAMES = 20


class Batch(NamedTuple):
    """What a request is answered with. A tuple, because that is what a loader can pin."""

    images: Tensor
    """uint8 [n, C, H, W], where the source has them."""
    labels: Tensor
    """int64 [n]: of the images that are shown."""
    indices: Tensor
    """int64 [n]: the places in the source that were asked for."""
    corrupt: Tensor
    """int64 [k]: the places in the source, each once, of images that cannot be read; others are shown instead."""


class ImageSource(Protocol):
    """Images and labels by request."""

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, request: BatchRequest) -> Batch:
        """The images of a request.

        Raises:
            UserError: this node cannot read them, or too many of them in a row are corrupt.
        """

    def name(self, index: int) -> str:
        """What to call an image in a message."""


@dataclass(frozen=True, kw_only=True)
class MemoryImages:
    """Images in memory, of the host or of a device: there are its batches made."""

    images: Tensor
    """uint8 [n, C, H, W]"""
    labels: Tensor
    """int64 [n], on the CPU."""
    title: str
    """What the images are together, such as `the training set`."""
    augmentation: Augmentation | ImageAugmentation | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """The images of a request."""
        indices = torch.tensor(request.indices, dtype=torch.int64)
        images = self.images[to_device(indices, self.images.device)]
        if request.epoch is not None and self.augmentation is not None:
            images = self.augmentation.batch(request.epoch, indices, images)
        return Batch(images, self.labels[indices], indices, torch.empty(0, dtype=torch.int64))

    def name(self, index: int) -> str:
        """`image 17 of the training set`."""
        return f"image {index} of {self.title}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The parts of a data set."""

    train: ImageSource
    val: ImageSource | None
    test: ImageSource | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int
    shape: tuple[int, int]
    """Height and width in pixels of the images to train on, as they come."""
    in_memory: bool
    cheap: bool
    """Whether a batch for training is made so fast that loader workers would not pay."""
    fingerprint: str
    """Changes when images or labels are added, removed or reordered; not with the directory that they lie in."""
    on_device: bool = False
    """Whether all images lie on the rank's device, where batches are made."""

    @property
    def size(self) -> int:
        """Side in pixels (height, if they differ) of the images to train on, as they come."""
        return self.shape[0]


# Slurm delivers a step's signals to all its processes. A worker that died of one would take the rank down with it
# before the rank has saved (KempnerInstitute/KempnerForge#177).
_NOT_FOR_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def _begin_worker(_worker: int) -> None:
    """Ignore what asks a rank to stop, but die with it.

    torch's workers look after their parent every five seconds only. As long as they keep a dead rank's sockets open,
    the other ranks wait for it.
    """
    die_with_parent(_NOT_FOR_WORKERS)


@contextmanager
def load_batches(
    source: ImageSource, requests: Iterable[BatchRequest], workers: int, *, pin_memory: bool
) -> Iterator[Iterator[Batch]]:
    """The batches of the requests, in their order; made by worker processes if there are any.

    Workers end with the context; if an exception ends it, with the process, which has no time to wait for them.
    They must be told to: Python ends its children with a SIGTERM and waits for them, and these ignore it.
    """
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # a Dataset in all but its base class
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        # A forked worker need not import torch again, which takes seconds.
        multiprocessing_context="fork" if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_begin_worker,
        # Without one of its own a loader draws from the global generator, and resumed runs would drift.
        generator=torch.Generator(),
    )
    # The workers are forked with the signals blocked: one must not die before it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield batches
    if workers:
        # What the iterator's destructor calls, whenever that may be.
        batches._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public way


@contextmanager
def load_device_batches(
    device: torch.device, source: ImageSource, requests: Iterable[BatchRequest], workers: int
) -> Iterator[Iterator[Batch]]:
    """The same, whose images and labels are on a rank's device before the step asks for them; on a CPU they are there.

    What workers make is pinned by a thread of the loader; without workers it is pinned when it is copied.
    """
    on_gpu = device.type == "cuda"
    with load_batches(source, requests, workers, pin_memory=on_gpu and workers > 0) as batches:
        yield prefetch_to_device(batches, device) if on_gpu else batches


def check_corrupt_limit(source: ImageSource, corrupt: Sequence[int], limit: int) -> None:
    """Check that no more than `limit` images are unreadable.

    Raises:
        SharedError: there are more; lists them.
    """
    if len(corrupt) > limit:
        names = ", ".join(map(source.name, corrupt[:_MAX_NAMES])) + (", ..." if len(corrupt) > _MAX_NAMES else "")
        raise SharedError(
            f"{len(corrupt)} images cannot be read, more than --max-corrupt-images {limit}: replace them or raise it: "
            f"{names}"
        )
