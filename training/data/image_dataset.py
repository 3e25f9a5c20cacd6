"""Photographs by request, whether their files are decoded or their pixels lie ready: what is the same for both.

Runs on every rank and in its loader workers.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.data.batch_schedule import BatchRequest
from training.data.dataset import Batch
from training.data.transforms.augment import ImageAugmentation
from training.data.transforms.crop import center_crop, empty_squares

# With so many corrupt images in a row it is no accident.
_MOST_IN_A_ROW = 100


class ImageStore(Protocol):
    """Images by index."""

    def __len__(self) -> int:
        """Number of images."""

    def read(self, index: int) -> Tensor | None:
        """The image (uint8 [h, w, 3]), or None if it is corrupt.

        Raises:
            UserError: this node cannot read it.
        """

    def name(self, index: int) -> str:
        """What to call the image in a message."""

    def fix(self) -> str:
        """What to do if many are corrupt."""

    def identity(self) -> bytes:
        """What tells the images from others; it does not depend on the directory that they lie in."""

    def part(self, indices: Tensor) -> "ImageStore":
        """Some of the images."""


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Images of an album. A corrupt one is replaced by the next, whoever reads it: a matter of the data alone."""

    album: ImageStore
    labels: Tensor
    """int64 [n]"""
    size: int
    augmentation: ImageAugmentation | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """The images (uint8 [n, 3, size, size]) of a request."""
        images = empty_squares(len(request.indices), self.size)
        shown, corrupt = [], set[int]()
        for place, index in enumerate(request.indices):
            readable, image = self.next_readable(index, corrupt)
            images[place] = self._look(readable, image, request.epoch)
            shown.append(readable)
        indices, shown_indices, corrupt_indices = (
            torch.tensor(values, dtype=torch.int64) for values in (request.indices, shown, sorted(corrupt))
        )
        if request.epoch is not None and self.augmentation is not None:
            images = self.augmentation.erase(request.epoch, shown_indices, images)
        return Batch(images, self.labels[shown_indices], indices, corrupt_indices)

    def name(self, index: int) -> str:
        """The image's path."""
        return self.album.name(index)

    def next_readable(self, index: int, corrupt: set[int]) -> tuple[int, Tensor]:
        """The first image from `index` on that is whole; those before it are added to `corrupt`."""
        most = min(len(self), _MOST_IN_A_ROW)
        for candidate in (place % len(self) for place in range(index, index + most)):
            image = self.album.read(candidate)
            if image is not None:
                return candidate, image
            corrupt.add(candidate)
        raise UserError(f"{self.name(index)} and the {most - 1} images after it are corrupt: {self.album.fix()}")

    def _look(self, index: int, image: Tensor, epoch: int | None) -> Tensor:
        if epoch is not None and self.augmentation is not None:
            return self.augmentation.one(epoch, index, image)
        return center_crop(image, self.size)

    def part(self, indices: Tensor) -> "ImageDataset":
        """Some of the images, as a source of their own."""
        return replace(self, album=self.album.part(indices), labels=self.labels[indices])
