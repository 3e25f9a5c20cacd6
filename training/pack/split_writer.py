"""Packs the pixels of a part of a data set into a file, by several processes. Imports no torch.

An array of records, one per image, says which images are done, and from which versions of their files. A record is
written once the pixels are durable. After a kill or a power failure, the next packer packs the images that have no
record. Each image has a fixed place in the file, so the bytes do not depend on the number of processes.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from hpc.base.files import fsync_directory, fsync_file
from hpc.base.text import visible
from training.config.packed_index import PackedFile
from training.data.image_folder import as_rgb, naming, with_image
from training.data.transforms.crop import center_box

CHANNELS = 3
MISSING, DONE, CORRUPT = range(3)
_RECORD = np.dtype([("state", "u1"), ("bytes", "<i8"), ("mtime_ns", "<i8"), ("sha256", "u1", 32)])
# Number of images in a task, which takes some hundredths of a second.
_CHUNK = 16
_LINE_SECONDS = 5.0
# Number of tasks per process that are submitted in advance, so that no process waits while records are written.
_AHEAD = 8


class SplitWriter:
    """Writes the pixels and the records of a part of the data."""

    def __init__(self, path: Path, source: Path, names: np.ndarray, size: int) -> None:
        self.path, self.source, self.names, self.size = path, source, names, size
        self._image_bytes = CHANNELS * size**2
        shape, kept = (len(names), size, size, CHANNELS), path.with_name("." + path.name.replace("pixels", "records"))
        pixels, records = _existing(self.path), _existing(kept)
        if pixels is None or records is None or (pixels.shape, records.shape) != (shape, shape[:1]):
            kept.unlink(missing_ok=True)  # records of other pixels
            pixels = open_memmap(self.path, mode="w+", dtype=np.uint8, shape=shape)
            fsync_directory(path.parent)
            records = open_memmap(kept, mode="w+", dtype=_RECORD, shape=shape[:1])
        self._offset, self.records = pixels.offset, records

    def path_of(self, index: int) -> Path:
        """Return the path of an image."""
        return self.source / os.fsdecode(self.names[index])

    def pack(self, pool: ProcessPoolExecutor, first: int) -> Future[np.ndarray]:
        """Start to pack the chunk from image `first` on. The future returns the records of the chunk."""
        records = np.array(self.records[first : first + _CHUNK])
        paths = [self.path_of(first + place) for place in range(len(records))]
        return pool.submit(pack_chunk, self.path, self._offset + first * self._image_bytes, self.size, paths, records)

    def record(self, first: int, records: np.ndarray) -> list[Path]:
        """Write the records of the chunk from image `first` on, and return the paths of its corrupt images."""
        self.records[first : first + len(records)] = records
        return [self.path_of(first + place) for place in np.flatnonzero(records["state"] == CORRUPT).tolist()]

    @property
    def done(self) -> int:
        """Number of images that have a record."""
        return int(np.count_nonzero(self.records["state"]))

    @property
    def file(self) -> PackedFile:
        """Description of the file of pixels for the index."""
        digest = hashlib.sha256(self.records["sha256"].tobytes()).hexdigest()
        return PackedFile(name=self.path.name, bytes=self.path.stat().st_size, sha256=digest)

    @property
    def corrupt(self) -> tuple[int, ...]:
        """Indices of the images that could not be decoded."""
        return tuple(np.flatnonzero(self.records["state"] == CORRUPT).tolist())


def _existing(path: Path) -> np.memmap | None:
    """Return a memory-mapped array from an earlier packer, or None if it does not exist or is incomplete."""
    try:
        return open_memmap(path, mode="r+")
    except (OSError, ValueError):
        return None


def has_records(directory: Path) -> bool:
    """Return whether a directory has a record of a packed image."""
    arrays = (_existing(path) for path in directory.glob(".*-records.npy"))
    return any(records is not None and records["state"].any() for records in arrays)


def pack_splits(splits: Sequence[SplitWriter], pool: ProcessPoolExecutor, workers: int) -> None:
    """Pack all images that have no record, or whose files have changed since their record.

    Raises OSError if an image cannot be read, or the disk is full.
    """
    total, before = sum(len(split.names) for split in splits), sum(split.done for split in splits)
    if before:
        print(f"{before} of {total} images were packed before", flush=True)
    began = printed = time.monotonic()
    chunks = ((split, first) for split in splits for first in range(0, len(split.names), _CHUNK))
    pending: deque[tuple[SplitWriter, int, Future[np.ndarray]]] = deque()
    while True:
        for split, first in islice(chunks, _AHEAD * workers - len(pending)):
            pending.append((split, first, split.pack(pool, first)))
        if not pending:
            return
        pending[0][-1].result()
        finished = []
        while pending and pending[0][-1].done():
            finished.append(pending.popleft())
        for split in {split for split, _, _ in finished}:
            fsync_file(split.path)
        for split, first, records in finished:
            for path in split.record(first, records.result()):
                print(visible(f"warning: {path} cannot be decoded: it is marked"), flush=True)
        now = time.monotonic()
        if now - printed >= _LINE_SECONDS and (done := sum(split.done for split in splits)) > before:
            printed, rate = now, (done - before) / (now - began)
            left = round((total - done) / rate)
            eta = f"{left // 60}:{left % 60:02d}"
            print(f"{done} of {total} images, {rate:.0f} images/s, eta {eta}", flush=True)


def pack_chunk(file: Path, offset: int, size: int, paths: Sequence[Path], records: np.ndarray) -> np.ndarray:
    """Decode consecutive images, and write them to a file from byte `offset` on. Runs in a process of the pool.

    `records` (_RECORD [n]) come from an earlier packer, and say which images to skip. Returns the new records. Raises
    UserError if an image's gray levels are unknown; or OSError if an image cannot be read, or the disk is full.
    """
    image_bytes = CHANNELS * size**2
    with file.open("r+b", buffering=0) as pixels:
        for place, path in enumerate(paths):
            record, status = records[place], path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if record["state"] != MISSING and (record["bytes"], record["mtime_ns"]) == stamp:
                continue
            with naming(path):
                square = with_image(path.read_bytes(), lambda image: as_square(image, size))
            content = bytes(image_bytes) if square is None else square.tobytes()
            pixels.seek(offset + place * image_bytes)
            left = memoryview(content)
            while left:  # a disk that becomes full writes only a part before it raises an error
                left = left[pixels.write(left) :]
            digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
            records[place] = (CORRUPT if square is None else DONE, *stamp, digest)
    return records


def as_square(image: Image.Image, size: int) -> np.ndarray:
    """Return the middle square of an image, scaled to uint8 [size, size, 3].

    A JPEG at least four times as large is decoded at a half, a quarter or an eighth of its size, which takes a fraction
    of the time. This is still at least twice as large as the result, so the resize filter determines the quality.
    """
    scale = 2 * size / min(image.size)
    image.draft(None, (round(image.width * scale), round(image.height * scale)))
    top, left, side, _ = center_box(image.height, image.width)
    pixels = as_rgb(image)
    return np.asarray(pixels.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)))
