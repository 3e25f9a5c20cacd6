"""Reads packed data: decoded images in memory-mapped files, for which all processes of a node share the page cache.

Runs on every rank and in its loader workers.
"""

import os
import socket
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpc.base.errors import UserError
from hpc.base.files import sha256_of
from hpc.base.text import file_name
from training.config.packed_index import AGAIN, PackedPart, PackIndex
from training.data.transforms.crop import CenterCrop, Crop


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
        # To read all pixels would take too long: `python -m training.pack --verify` compares their checksum.
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
