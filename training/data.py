"""The data of a run: what a rank can ask for images and labels by index, and the loader that asks ahead.

Runs on every rank. A source is indexed with a `Request`, so one call makes one rank's part of a batch, wherever it
is made: in the rank or in a loader worker. No source has random numbers of its own.
"""

import hashlib
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpc.errors import UserError
from training.augment import Augmentation, augment_batch
from training.config import DataLayout, TrainConfig
from training.counted import Purpose, permutation, stream
from training.folder import FolderImages, scan_classes, scan_folder
from training.idx import class_names, read_idx_pair
from training.plan import Request

# ImageNet's, which suit photographs.
_PHOTO_MEAN, _PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SAMPLED_FOR_STATISTICS = 5000


class Source(Protocol):
    """Images and labels by request."""

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Images (uint8 [n, C, H, W]) and labels (int64 [n])."""


@dataclass(frozen=True, kw_only=True)
class MemoryImages:
    """Images in memory."""

    images: Tensor
    """uint8 [n, C, H, W]"""
    labels: Tensor
    """int64 [n]"""
    augmentation: Augmentation | None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Images and labels of a request."""
        indices = torch.tensor(request.indices, dtype=torch.int64)
        images = self.images[indices]
        if request.epoch is not None and self.augmentation is not None:
            images = augment_batch(self.augmentation, request.epoch, indices, images)
        return images, self.labels[indices]

    def part(self, indices: Tensor, augmentation: Augmentation | None) -> "MemoryImages":
        """Some of the images, as a source of their own."""
        return MemoryImages(images=self.images[indices], labels=self.labels[indices], augmentation=augmentation)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The parts of a data set."""

    train: Source
    val: Source | None
    test: Source | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int
    size: int
    """Side in pixels (height, if they differ) of the images as they come."""
    in_memory: bool
    fingerprint: str
    """Changes when images or labels are added, removed or reordered; not with the directory that they lie in."""


def load_data(config: TrainConfig, layout: DataLayout, folder_size: int) -> Data:
    """Open the data. Without a validation set of their own, a part of the training set is held out, chosen by seed.

    Args:
        config: says how much to hold out, and how to augment.
        layout: where the data are.
        folder_size: side in pixels that images of a folder are scaled to.

    Raises:
        UserError: files are missing, torn, or do not fit together.
    """
    if layout.kind == "idx":
        return _load_idx(config, layout)
    return _load_folder(config, layout, folder_size)


def _load_idx(config: TrainConfig, layout: DataLayout) -> Data:
    images, labels = read_idx_pair(layout.train, "train")
    everything = MemoryImages(images=images, labels=labels, augmentation=None)
    tested = read_idx_pair(layout.test, "test") if layout.test else None
    held, kept = _hold_out(config, len(labels))
    test = MemoryImages(images=tested[0], labels=tested[1], augmentation=None) if tested else None
    train = everything.part(kept, _augmentation(config, flip_by_default=False))
    _check_labels(labels, tested[1] if tested else None)
    mean, std = _statistics(images)
    return Data(
        train=train,
        val=everything.part(held, None) if len(held) else None,
        test=test,
        classes=class_names(labels, int(labels.max()) + 1),
        mean=mean,
        std=std,
        channels=images.shape[1],
        size=images.shape[2],
        in_memory=True,
        fingerprint=_fingerprint(train, test),
    )


def _load_folder(config: TrainConfig, layout: DataLayout, size: int) -> Data:
    classes = scan_classes(layout.train)
    everything = scan_folder(layout.train, classes, size)
    test = scan_folder(layout.test, classes, size) if layout.test else None
    val = scan_folder(layout.val, classes, size) if layout.val else None
    held, kept = _hold_out(config, len(everything)) if val is None else (None, torch.arange(len(everything)))
    if held is not None and len(held):
        val = everything.part(held, None)
    train = everything.part(kept, _augmentation(config, flip_by_default=True))
    return Data(
        train=train,
        val=val,
        test=test,
        classes=classes,
        mean=_PHOTO_MEAN,
        std=_PHOTO_STD,
        channels=3,
        size=size,
        in_memory=False,
        fingerprint=_fingerprint(train, val, test),
    )


def _augmentation(config: TrainConfig, *, flip_by_default: bool) -> Augmentation | None:
    if config.augment == "none":
        return None
    flip = flip_by_default if config.augment == "auto" else config.augment == "crop-flip"
    return Augmentation(seed=config.seed, crop=True, flip=flip)


def _hold_out(config: TrainConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Indices to hold out and to train on, each sorted."""
    order = permutation(stream(config.seed, Purpose.HOLD_OUT), samples)
    held = round(samples * config.val_fraction)
    if held == samples:
        raise UserError(f"--val-fraction is {config.val_fraction}, which leaves nothing of {samples} to train on")
    return order[:held].sort().values, order[held:].sort().values


def _check_labels(train: Tensor, test: Tensor | None) -> None:
    if test is not None and len(test) and int(test.max()) > int(train.max()):
        raise UserError(f"the test set has label {int(test.max())}, but the training set ends at {int(train.max())}")


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of evenly spread images: whole numbers are summed, so exact."""
    some = images[:: max(1, len(images) // _SAMPLED_FOR_STATISTICS)].double() / 255
    std, mean = torch.std_mean(some, dim=(0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(std.clamp(min=1 / 255).tolist())


def _fingerprint(*sources: "MemoryImages | FolderImages | None") -> str:
    digest = hashlib.sha256()
    for source in sources:
        if source is not None:
            digest.update(f"{len(source)} samples".encode())
            digest.update(source.labels.numpy().tobytes())
            if isinstance(source, FolderImages):
                digest.update(source.names.tobytes())
    return digest.hexdigest()


# Slurm delivers a step's signals to all its processes. A worker that died of one would take the rank down with it
# before the rank has saved (KempnerInstitute/KempnerForge#177).
_NOT_FOR_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def _ignore_signals(_worker: int) -> None:
    for number in _NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def load_ahead(
    source: Source, requests: Iterable[Request], workers: int, *, pin_memory: bool
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """The images and labels of the requests, in their order; made by worker processes if there are any.

    Workers end with the context. They must be told to: a process that exits ends its children with a SIGTERM and
    waits for them, and these ignore it.
    """
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # a Dataset in all but its base class
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        # A forked worker need not import torch again, which takes seconds.
        multiprocessing_context="fork" if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        # Without one of its own a loader draws from the global generator, and resumed runs would drift.
        generator=torch.Generator(),
    )
    # The workers are forked with the signals blocked: one must not die before it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield batches
    finally:
        if workers:
            # What the iterator's destructor calls; but an exception's traceback keeps the iterator alive.
            batches._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public way
