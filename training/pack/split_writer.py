"""The pixels of one part of a data set: one array in a file, filled by several processes. Imports no torch.

Beside it is an array of records, one per image: which images are done, and from which version of their files. A record
is written when the pixels are durable, so a packer that was killed, or whose node lost power, repeats the images that
have none. Each image has its place, so the bytes do not depend on the number of processes.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from hpc.core.files import fsync_directory, fsync_file
from training.config.packed_index import PackedFile
from training.data.image_folder import as_rgb, with_image
from training.data.transforms.crop import center_box
from training.pack.progress_display import PackProgress

CHANNELS = 3
MISSING, DONE, CORRUPT = range(3)
_RECORDS = ".{}-records.npy"
_RECORD = np.dtype([("state", "u1"), ("bytes", "<i8"), ("mtime_ns", "<i8"), ("sha256", "u1", 32)])
# Images of one task: some hundredths of a second.
_CHUNK = 16
# Tasks per process that are submitted beforehand, so that no process waits while the packer writes records.
_AHEAD = 8


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive images for one process to pack."""

    file: Path
    """The file of the pixels."""
    offset: int
    """Bytes in it before these images."""
    size: int
    paths: tuple[Path, ...]
    records: np.ndarray
    """_RECORD [n] of these images, as an earlier packer left them."""


class SplitWriter:
    """The files of one part while it is packed."""

    def __init__(self, directory: Path, name: str, source: Path, names: np.ndarray, size: int) -> None:
        self.path = directory / f"{name}-pixels.npy"
        self.source, self.names, self.size = source, names, size
        shape, kept = (len(names), size, size, CHANNELS), directory / _RECORDS.format(name)
        pixels, records = _existing(self.path), _existing(kept)
        if pixels is None or records is None or (pixels.shape, records.shape) != (shape, shape[:1]):
            kept.unlink(missing_ok=True)  # records of other pixels
            pixels = open_memmap(self.path, mode="w+", dtype=np.uint8, shape=shape)
            fsync_directory(directory)
            records = open_memmap(kept, mode="w+", dtype=_RECORD, shape=shape[:1])
        self._offset, self.records = pixels.offset, records

    def path_of(self, index: int) -> Path:
        """The file of an image."""
        return self.source / os.fsdecode(self.names[index])

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """All images, each chunk with the index of its first one."""
        for first in range(0, len(self.names), _CHUNK):
            indices = range(first, min(first + _CHUNK, len(self.names)))
            yield (
                first,
                Chunk(
                    file=self.path,
                    offset=self._offset + first * self.size**2 * CHANNELS,
                    size=self.size,
                    paths=tuple(map(self.path_of, indices)),
                    records=np.array(self.records[indices.start : indices.stop]),
                ),
            )

    @property
    def done(self) -> int:
        """Images that have a record."""
        return int(np.count_nonzero(self.records["state"]))

    @property
    def packed(self) -> PackedFile:
        """The file as the index describes it."""
        digest = hashlib.sha256(self.records["sha256"].tobytes()).hexdigest()
        return PackedFile(name=self.path.name, bytes=self.path.stat().st_size, sha256=digest)

    @property
    def corrupt(self) -> tuple[int, ...]:
        """Indices of the images that could not be decoded."""
        return tuple(np.flatnonzero(self.records["state"] == CORRUPT).tolist())


def _existing(path: Path) -> np.memmap | None:
    """A mapped array that an earlier packer has made; None: it was not, or not completely."""
    try:
        return open_memmap(path, mode="r+")
    except (OSError, ValueError):
        return None


def has_records(directory: Path) -> bool:
    """Whether any image is packed in a directory."""
    found = (_existing(path) for path in directory.glob(_RECORDS.format("*")))
    return any(records is not None and records["state"].any() for records in found)


def pack_splits(splits: Sequence[SplitWriter], pool: ProcessPoolExecutor, workers: int, progress: PackProgress) -> None:
    """Pack all images that have no record, or whose files have changed since.

    Raises:
        OSError: an image cannot be read, or the disk is full.
    """
    chunks = ((split, first, chunk) for split in splits for first, chunk in split.chunks())
    pending: deque[tuple[SplitWriter, int, Chunk, Future[np.ndarray]]] = deque()
    while True:
        for split, first, chunk in islice(chunks, _AHEAD * workers - len(pending)):
            pending.append((split, first, chunk, pool.submit(pack_chunk, chunk)))
        if not pending:
            return
        finished = [pending.popleft()]
        finished[0][-1].result()
        while pending and pending[0][-1].done():
            finished.append(pending.popleft())
        for split in {entry[0] for entry in finished}:
            fsync_file(split.path)
        for split, first, chunk, future in finished:
            records = future.result()
            split.records[first : first + len(records)] = records
            corrupt = [path for path, record in zip(chunk.paths, records, strict=True) if record["state"] == CORRUPT]
            progress.advance(int(np.count_nonzero(chunk.records["state"] == MISSING)), corrupt)


def pack_chunk(chunk: Chunk) -> np.ndarray:
    """Decode images and write them to their places. Runs in a process of the pool.

    Raises:
        OSError: an image cannot be read, or the disk is full.

    Returns:
        _RECORD [n].
    """
    records, image_bytes = chunk.records.copy(), chunk.size**2 * CHANNELS
    with chunk.file.open("r+b", buffering=0) as file:
        for index, path in enumerate(chunk.paths):
            status = path.stat()
            record = records[index]
            if record["state"] and (record["bytes"], record["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
                continue
            square = with_image(path.read_bytes(), lambda image: as_square(image, chunk.size))
            pixels = bytes(image_bytes) if square is None else square.tobytes()
            file.seek(chunk.offset + index * image_bytes)
            left = memoryview(pixels)
            while left:  # a full disk takes a part first
                left = left[file.write(left) :]
            digest = np.frombuffer(hashlib.sha256(pixels).digest(), np.uint8)
            records[index] = (CORRUPT if square is None else DONE, status.st_size, status.st_mtime_ns, digest)
    return records


def as_square(image: Image.Image, size: int) -> np.ndarray:
    """The middle of an image, uint8 [size, size, 3], scaled so that the shorter side of the image becomes `size`.

    A JPEG at least four times as large is decoded at a half, a quarter or an eighth of its size, which takes a
    fraction of the time. It is still at least twice as large as the result, so the quality is the resize filter's.
    """
    scale = 2 * size / min(image.size)
    image.draft(None, (round(image.width * scale), round(image.height * scale)))
    top, left, side, _ = center_box(image.height, image.width)
    pixels = as_rgb(image)
    return np.asarray(pixels.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)))


def pixels_sha256(path: Path, images: int, pool: ProcessPoolExecutor) -> str:
    """The checksum of a file of pixels, as `SplitWriter.packed` has it."""
    digest = hashlib.sha256()
    for digests in pool.map(partial(_image_digests, path), range(0, images, _CHUNK), chunksize=_AHEAD):
        digest.update(digests)
    return digest.hexdigest()


def _image_digests(path: Path, first: int) -> bytes:
    """The SHA-256 (32 bytes) of each image of a chunk. Runs in a process of the pool."""
    images = np.load(path, mmap_mode="r", allow_pickle=False)[first : first + _CHUNK]
    return b"".join(hashlib.sha256(image).digest() for image in images)
