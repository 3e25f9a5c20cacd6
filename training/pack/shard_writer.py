"""Shards of a packed data set: files of decoded images, made by the processes of a packer. Imports no torch.

Several processes write into a shard at once, each image at its place, so the bytes do not depend on how many they are.
A shard is written under a temporary name; when it is whole it gets its own name and then a record, which a packer
that was killed finds when it starts again.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hpc.core.files import fsync_directory, sha256_of, write_json
from training.config.packed_index import PackedFile
from training.data.image_folder import as_rgb, with_image
from training.data.transforms.crop import center_box

CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard to be made."""

    directory: Path
    """Where it is made."""
    name: str
    source: Path
    """The directory that is packed."""
    paths: np.ndarray
    """Of its images below `source`, as bytes [n]."""
    first: int
    """Place of its first image in the part."""
    size: int

    @property
    def path(self) -> Path:
        """Its file once it is whole."""
        return self.directory / self.name

    @property
    def temporary(self) -> Path:
        """Its file until then."""
        return self.directory / f".{self.name}.tmp"

    @property
    def record(self) -> Path:
        """Says that it is whole, and what it was made from."""
        return self.directory / f".{self.name}.json"

    def path_of(self, place: int) -> Path:
        """The source of the image at a place of the part."""
        return self.source / os.fsdecode(self.paths[place - self.first])

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(_header(self)) + len(self.paths) * self.size**2 * CHANNELS


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What became of some consecutive images."""

    stamps: list[tuple[int, int]]
    """Size in bytes and time of modification in nanoseconds of each source."""
    corrupt: list[int]
    """The places in the part of those that could not be decoded."""


@dataclass(frozen=True, kw_only=True)
class PackedRecord:
    """A whole shard."""

    file: PackedFile
    corrupt: tuple[int, ...]
    sources: str
    """A digest of the names, sizes and times of its sources."""


def _header(shard: Shard) -> bytes:
    """What NumPy writes in front of such an array (NEP 1), in 128 bytes."""
    shape = (len(shard.paths), shard.size, shard.size, CHANNELS)
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(128 - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def begin(shard: Shard) -> None:
    """Make the file, with nothing in it but zeros."""
    with shard.temporary.open("wb") as file:
        file.write(_header(shard))
        file.truncate(shard.bytes)


def pack_images(shard: Shard, start: int, stop: int) -> Packed:
    """Decode some of a shard's images and write them to their places.

    Raises:
        OSError: an image cannot be read, or the disk is full.
    """
    packed = Packed(stamps=[], corrupt=[])
    squares = np.zeros((stop - start, shard.size, shard.size, CHANNELS), np.uint8)
    for place in range(stop - start):
        content, stamp = _read(shard.path_of(shard.first + start + place))
        packed.stamps.append(stamp)
        square = with_image(content, lambda image: as_square(image, shard.size))
        if square is None:
            packed.corrupt.append(shard.first + start + place)
        else:
            squares[place] = square
    _write(shard.temporary, squares, len(_header(shard)) + start * shard.size**2 * CHANNELS)
    return packed


def _read(path: Path) -> tuple[bytes, tuple[int, int]]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        return file.read(), _stamp(status)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _write(path: Path, values: np.ndarray, offset: int) -> None:
    """Write all of it; a full disk takes a part first."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        left = memoryview(values.data).cast("B")
        while left:
            left = left[file.write(left) :]


def as_square(image: Image.Image, size: int) -> np.ndarray:
    """The middle of an image, uint8 [size, size, 3]. The shorter side of the image becomes `size`.

    A JPEG at least four times as large is decoded at a half, a quarter or an eighth of its size, which takes a
    fraction of the time; it is still twice as large as needed, so that the filter makes the result.
    """
    scale = 2 * size / min(image.size)
    image.draft(None, (round(image.width * scale), round(image.height * scale)))
    top, left, side, _ = center_box(image.height, image.width)
    pixels = as_rgb(image)
    return np.asarray(pixels.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)))


def seal(shard: Shard, parts: Sequence[Packed]) -> PackedRecord:
    """Give a shard that is whole its name, durably, and write its record."""
    with shard.temporary.open("rb") as written:
        os.fsync(written.fileno())
    file = PackedFile(name=shard.name, bytes=shard.bytes, sha256=sha256_of(shard.temporary))
    shard.temporary.rename(shard.path)
    fsync_directory(shard.directory)
    corrupt = tuple(place for part in parts for place in part.corrupt)
    stamps = [stamp for part in parts for stamp in part.stamps]
    record = PackedRecord(file=file, corrupt=corrupt, sources=_digest(shard, stamps))
    write_json(shard.record, asdict(record))
    return record


def _digest(shard: Shard, stamps: Sequence[tuple[int, int]]) -> str:
    digest = hashlib.sha256(shard.paths.tobytes())
    digest.update(json.dumps([list(stamp) for stamp in stamps]).encode())
    return digest.hexdigest()


def find(shard: Shard) -> PackedRecord | None:
    """The record of a shard that is whole and whose sources are what they were; None: it is to be made."""
    try:
        record = _record(json.loads(shard.record.read_bytes()))
        if shard.path.stat().st_size != record.file.bytes:
            return None
        stamps = [_stamp((shard.source / os.fsdecode(name)).stat()) for name in shard.paths]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.sources == _digest(shard, stamps) else None


def _record(content: dict[str, Any]) -> PackedRecord:
    return PackedRecord(
        file=PackedFile(**content["file"]), corrupt=tuple(content["corrupt"]), sources=content["sources"]
    )
