"""Image folders: images of class directories, decoded when they are asked for.

Runs on every rank and in its loader workers.
"""

import io
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc.errors import UserError
from training.augment import Augmentation
from training.data import Batch
from training.plan import Request

# Part of the shorter side that is looked at in an evaluation: the usual 224 of 256 pixels.
_CENTER = 224 / 256
# With so many corrupt images in a row it is no accident.
_MOST_IN_A_ROW = 100


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """Images by index. A corrupt one is replaced by the next, whoever reads it: that is a matter of the data alone."""

    root: Path
    names: np.ndarray
    """Paths below `root` as bytes [n]: one array, for workers that touch a list of strings copy its pages."""
    labels: Tensor
    """int64 [n]"""
    size: int
    augmentation: Augmentation | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, request: Request) -> Batch:
        """The images (uint8 [n, 3, size, size]) of a request."""
        images = torch.empty(len(request.indices), 3, self.size, self.size, dtype=torch.uint8)
        shown, corrupt = [], set[int]()
        for place, index in enumerate(request.indices):
            readable, image = self._next_readable(index, corrupt)
            images[place] = self._look(readable, image, request.epoch)
            shown.append(readable)
        indices, shown_indices, corrupt_indices = (
            torch.tensor(values, dtype=torch.int64) for values in (request.indices, shown, sorted(corrupt))
        )
        return Batch(images, self.labels[shown_indices], indices, corrupt_indices)

    def name(self, index: int) -> str:
        """The image's path."""
        return str(self._path(index))

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])

    def _next_readable(self, index: int, corrupt: set[int]) -> tuple[int, Image.Image]:
        """The first image from `index` on that can be decoded; those before it are added to `corrupt`."""
        most = min(len(self), _MOST_IN_A_ROW)
        for candidate in (place % len(self) for place in range(index, index + most)):
            image = _decode(self._path(candidate))
            if image is not None:
                return candidate, image
            corrupt.add(candidate)
        raise UserError(f"{self.name(index)} and the {most - 1} images after it are corrupt: copy the data again")

    def _look(self, index: int, image: Image.Image, epoch: int | None) -> Tensor:
        if epoch is not None and self.augmentation is not None:
            return self.augmentation.one(epoch, index, image)
        left, top = ((side - min(image.size) * _CENTER) / 2 for side in image.size)
        box = (left, top, image.width - left, image.height - top)
        scaled = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)

    def part(self, indices: Tensor) -> "FolderImages":
        """Some of the images, as a source of their own."""
        return replace(self, names=self.names[indices.numpy()], labels=self.labels[indices])


def _decode(path: Path) -> Image.Image | None:
    """The image as RGB, or None if the file holds no whole image.

    Raises:
        UserError: the file cannot be read, which is a matter of this node and no property of the image.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): copy the data there again, "
            "or leave that node out"
        ) from error
    try:
        with Image.open(io.BytesIO(content)) as file:
            return file.convert("RGB")
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # Pillow's decoders raise nearly everything on broken files
        return None
