"""Packed data: decoded images in files that are mapped into memory, once per node: all processes share the page cache.

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

from hpc.core.errors import UserError
from hpc.core.files import sha256_of
from training.config.packed_index import AGAIN, INDEX, PackedFile, PackedPart, PackIndex


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """The images of a part, or some of them."""

    directory: Path
    source: Path
    """The directory that was packed."""
    shards: tuple[Tensor, ...]
    """uint8 [n, size, size, 3]: mapped files, to be read only; n is `shard_images` for all but the last."""
    shard_images: int
    names: np.ndarray
    """Paths below `source`, as bytes, of all the part's images: a mapped file too."""
    corrupt: frozenset[int]
    """The places in the part of images that could not be decoded."""
    fingerprint: str
    places: Tensor
    """int64 [n]: the places in the part of these images."""

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> Tensor | None:
        """The image, or None if there was none to pack."""
        place = int(self.places[index])
        if place in self.corrupt:
            return None
        shard, row = divmod(place, self.shard_images)
        return self.shards[shard][row]

    def name(self, index: int) -> str:
        """The path of the image's source."""
        return str(self.source / os.fsdecode(self.names[int(self.places[index])]))

    def fix(self) -> str:
        """Where whole images come from."""
        return f"replace them and pack again to {self.directory}"

    def identity(self) -> bytes:
        """The fingerprint of all the content, and which of it this is."""
        return self.fingerprint.encode() + self.places.numpy().tobytes()

    def part(self, indices: Tensor) -> "PackedImages":
        """Some of the images."""
        return replace(self, places=self.places[indices])


def open_part(directory: Path, index: PackIndex, part: PackedPart) -> tuple[PackedImages, Tensor]:
    """The images of a part and their labels (int64 [n]).

    Raises:
        UserError: a file is missing, is truncated, or holds something else.
    """
    firsts = range(0, part.images, index.shard_images)
    counts = [min(index.shard_images, part.images - first) for first in firsts]
    if len(counts) != len(part.shards):
        raise UserError(f"{directory / INDEX} has {len(part.shards)} shards for {len(counts)}: {AGAIN}")
    shards = [
        _as_tensor(_mapped(directory / file.name, np.uint8, (count, index.size, index.size, 3)))
        for file, count in zip(part.shards, counts, strict=True)
    ]
    for file in (part.labels, part.names):
        _check_content(directory, file)
    store = PackedImages(
        directory=directory,
        source=Path(index.source),
        shards=tuple(shards),
        shard_images=index.shard_images,
        names=_mapped(directory / part.names.name, np.bytes_, (part.images,)),
        corrupt=frozenset(part.corrupt),
        fingerprint=index.fingerprint,
        places=torch.arange(part.images),
    )
    return store, _as_tensor(_mapped(directory / part.labels.name, np.int64, (part.images,)))


def _mapped(path: Path, kind: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """An array in a mapped file, which is not read by that."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): {AGAIN}") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is truncated or something else ({error}): {AGAIN}") from error
    if array.shape != shape or not np.issubdtype(array.dtype, kind):
        raise UserError(f"{path} holds {array.dtype} {list(array.shape)} instead of {list(shape)}: {AGAIN}")
    return array


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # torch cannot know that nobody writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _check_content(directory: Path, file: PackedFile) -> None:
    """Make sure of a small file; the shards' checksums are compared when they are copied, or by `training.pack`."""
    if sha256_of(directory / file.name) != file.sha256:
        raise UserError(f"{directory / file.name} does not have its checksum: {AGAIN}")
