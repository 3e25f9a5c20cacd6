"""Defines the data sets: images in memory, generated images, and images that are read one by one.

Packed images are decoded images in memory-mapped files, for which all processes of a node share the page cache.

Runs on every rank and in its loader workers. A data set is indexed with a `BatchRequest` and returns augmented images.
"""

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpc.base.errors import UserError
from hpc.base.files import sha256_of
from hpc.base.text import file_name
from training.config.dataset_layout import no_images
from training.config.packed_index import AGAIN, PackedPart, PackIndex
from training.config.train_config import Interpolation
from training.data.batch_schedule import BatchRequest
from training.data.image_folder import FolderImages
from training.data.loader import Batch, ImageSource, to_device
from training.data.transforms.augment import Augmentation
from training.data.transforms.crop import CenterCrop, Crop
from training.runtime.process_group import SharedError


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """All or some images of a part of a packed data set."""

    directory: Path
    source: Path
    pixels: Tensor
    """Pixels of all the part's images, uint8 [images, size, size, 3]: a memory-mapped file, read-only."""
    names: np.ndarray
    """Paths of all the part's images below `source`, the directory that was packed, as bytes: a memory-mapped file."""
    corrupt: frozenset[int]
    """Indices, in the part, of images that could not be decoded."""
    fingerprint: str
    indices: Tensor
    """Indices of these images in the part, int64 [n]."""

    def read(self, index: int, crop: Crop | CenterCrop) -> Tensor | None:
        """Return the crop of an image (uint8 [3, *crop.size]), or None if the image is corrupt."""
        packed = int(self.indices[index])
        return None if packed in self.corrupt else crop.of(self.pixels[packed])

    def name(self, index: int) -> str:
        """Return the source image's path."""
        return file_name(str(self.source / os.fsdecode(self.names[int(self.indices[index])])))

    def fix(self) -> str:
        """Return an instruction for the user if many images are corrupt."""
        return f"replace them and pack again to {self.directory}"

    def identity(self) -> bytes:
        """Return the fingerprint of the packed data and the indices of these images as bytes."""
        return self.fingerprint.encode() + self.indices.numpy().tobytes()

    def part(self, indices: Tensor) -> "PackedImages":
        """Return a store of the images with these indices."""
        return replace(self, indices=self.indices[indices])


def open_part(directory: Path, index: PackIndex, part: PackedPart) -> tuple[PackedImages, Tensor]:
    """Open a part's images and labels (int64 [n]). Raises UserError if a file is missing, damaged, or another."""
    shape = (part.images, index.size, index.size, 3)
    pixels = _as_tensor(_map_array(directory / part.pixels.name, np.uint8, shape))
    for file in (part.labels, part.names):
        # To read all pixels would take too long.
        if sha256_of(directory / file.name) != file.sha256:
            raise UserError(f"{directory / file.name} does not have its checksum: {AGAIN}")
    store = PackedImages(
        directory=directory,
        source=Path(index.source),
        pixels=pixels,
        names=_map_array(directory / part.names.name, np.bytes_, shape[:1]),
        corrupt=frozenset(part.corrupt),
        fingerprint=index.fingerprint,
        indices=torch.arange(part.images),
    )
    return store, _as_tensor(_map_array(directory / part.labels.name, np.int64, shape[:1]))


def _map_array(path: Path, kind: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Memory-map the array in a file, and check its shape and type."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): {AGAIN}") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is truncated or not a NumPy array ({error}): {AGAIN}") from error
    if array.shape != shape or not np.issubdtype(array.dtype, kind):
        raise UserError(f"{path} holds {array.dtype} {list(array.shape)} instead of {list(shape)}: {AGAIN}")
    return array


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # torch cannot know that nothing writes to the tensor.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


_MAX_NAMES = 20
# This many corrupt images in a row have a common cause, such as a damaged copy.
_MAX_CORRUPT_IN_A_ROW = 100
_NO_INDICES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class MemoryImages:
    """Images of one size in the memory of the host or a device. Batches are made where the images are."""

    images: Tensor
    """Pixels, uint8 [n, C, H, W]."""
    labels: Tensor
    """Labels, int64 [n], on the CPU."""
    title: str
    """Name of the part of the data in messages, such as `the training set`."""
    augmentation: Augmentation | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """Return a request's images, augmented."""
        samples = torch.tensor(request.indices, dtype=torch.int64)
        indices = samples % len(self)
        images = self.images[to_device(indices, self.images.device)]
        if request.epoch is not None and self.augmentation is not None:
            if self.augmentation.resizes:
                height, width = images.shape[2:]
                for place, index in enumerate(request.indices):
                    crop = self.augmentation.crop(request.epoch, index, (height, width))
                    images[place] = crop.of(images[place].permute(1, 2, 0))
            images = self.augmentation.batch(request.epoch, samples, images)
        return Batch(images, self.labels[indices], indices, _NO_INDICES)

    def name(self, index: int) -> str:
        """Return an image's name for messages, such as `image 17 of the training set`."""
        return f"image {index} of {self.title}"


@dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """Any number of images from a small generated pool, so that a request costs almost nothing."""

    images: Tensor
    """Pool of noise, uint8 [m, 3, size, size], in pinned memory if there is a GPU."""
    labels: Tensor
    """Labels, int64 [n]."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """Return the first images of the pool, for any indices."""
        indices = torch.tensor(request.indices, dtype=torch.int64) % len(self)
        pool = self.images
        count = len(indices)
        images = pool[:count] if count <= len(pool) else pool[torch.arange(count) % len(pool)]
        return Batch(images, self.labels[indices], indices, _NO_INDICES)

    def name(self, index: int) -> str:
        """Return an image's name for messages, such as `generated image 17`."""
        return f"generated image {index}"


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Images of a store. The next readable image replaces a corrupt one, in the same way on every rank."""

    store: FolderImages | PackedImages
    labels: Tensor
    """Labels, int64 [n]."""
    size: int
    """Side, in pixels, to which images are resized."""
    crop_pct: float
    """Side of the center crop in an evaluation, as a share of the image's shorter side."""
    interpolation: Interpolation
    """Interpolation when the center crop of an evaluation is resized."""
    augmentation: Augmentation | None = None
    size_in_epoch: Callable[[int], int] | None = None
    """The side of the images in an epoch of the training. Default: `size`."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """Return a request's images (uint8 [n, 3, side, side])."""
        # Use interleaved channels, the fastest memory format for decoders and models.
        side = self._side(request.epoch)
        images = torch.empty(len(request.indices), side, side, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        shown = []
        corrupt = set[int]()
        for place, sample in enumerate(request.indices):
            readable, images[place] = self._next_readable(request.epoch, sample, corrupt)
            shown.append(readable)
        samples, shown_samples, corrupt_indices = (
            torch.tensor(values, dtype=torch.int64) for values in (request.indices, shown, sorted(corrupt))
        )
        if request.epoch is not None and self.augmentation is not None:
            images = self.augmentation.batch(request.epoch, shown_samples, images)
        return Batch(images, self.labels[shown_samples % len(self)], samples % len(self), corrupt_indices)

    def name(self, index: int) -> str:
        """Return the image's path."""
        return self.store.name(index)

    def part(self, indices: Tensor) -> "ImageDataset":
        """Return a data set of the images with these indices."""
        return replace(self, store=self.store.part(indices), labels=self.labels[indices])

    def crop(self, epoch: int | None, sample: int) -> Crop | CenterCrop:
        """Return what is shown of a sample in an epoch, or in an evaluation, which is None."""
        if epoch is None or self.augmentation is None:
            return CenterCrop(size=(self.size, self.size), crop_pct=self.crop_pct, interpolation=self.interpolation)
        side = self._side(epoch)
        return self.augmentation.crop(epoch, sample, (side, side))

    def _side(self, epoch: int | None) -> int:
        return self.size if epoch is None or self.size_in_epoch is None else self.size_in_epoch(epoch)

    def _next_readable(self, epoch: int | None, sample: int, corrupt: set[int]) -> tuple[int, Tensor]:
        """Return the first readable sample from `sample` on, and its crop. Adds the skipped indices to `corrupt`."""
        most = min(len(self), _MAX_CORRUPT_IN_A_ROW)
        index = sample % len(self)
        for place in range(index, index + most):
            candidate = place % len(self)
            shown = candidate + sample - index  # of the same repetition
            image = self.store.read(candidate, self.crop(epoch, shown))
            if image is not None:
                return shown, image
            corrupt.add(candidate)
        raise UserError(f"{self.name(index)} and the {most - 1} images after it are corrupt: {self.store.fix()}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training, validation and test set of a data set, and their common properties."""

    train: ImageSource
    val: ImageSource | None
    test: ImageSource | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int
    shape: tuple[int, int]
    """Height and width in pixels of the training images, as the data set returns them."""
    in_memory: bool
    cheap: bool
    """Whether batches are made so fast that loader workers do not pay off."""
    fingerprint: str
    """Digest that changes if images or labels are added, removed or reordered, but not if their directory moves."""
    on_device: bool = False
    """Whether all images are on the rank's device, which then makes the batches."""

    @property
    def size(self) -> int:
        """Side in pixels of the training images, as the data set returns them; their height if they are not square."""
        return self.shape[0]


def empty_classes(data: Data) -> list[str]:
    """Return a warning if no image of a class is trained on."""
    counts = torch.bincount(data.train.labels, minlength=len(data.classes)).tolist()
    names = [name for name, count in zip(data.classes, counts, strict=True) if not count]
    return [no_images("the training set", names)] if names else []


def check_corrupt_limit(source: ImageSource, corrupt: Sequence[int], limit: int) -> None:
    """Raise SharedError, which lists some images, if more than `limit` are unreadable."""
    if len(corrupt) > limit:
        names = ", ".join(map(source.name, corrupt[:_MAX_NAMES])) + (", ..." if len(corrupt) > _MAX_NAMES else "")
        raise SharedError(
            f"{len(corrupt)} images cannot be read, more than --max-corrupt-images {limit}: replace them or raise it: "
            f"{names}"
        )
