"""Reads and writes the index of a packed data set. Runs everywhere; imports neither torch nor NumPy.

A packed data set is a directory of `.npy` files. Its index has their sizes and checksums, and is written last.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.files import write_json

INDEX = "torchrelay-pack.json"
VERSION = 2
AGAIN = "copy the packed data again, or pack them again (hpc pack SRC DST)"


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """One file of a packed data set."""

    name: str
    bytes: int
    sha256: str
    """SHA-256 of the content; for pixels, SHA-256 of the SHA-256 (32 bytes) of each image."""


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """The training, validation or test set."""

    name: str
    """`train`, `val` or `test`."""
    images: int
    corrupt: tuple[int, ...]
    """Indices of the images that could not be decoded, whose pixels are black."""
    pixels: PackedFile
    """File of the pixels, uint8 [images, size, size, 3]."""
    labels: PackedFile
    """File of the labels, int64 [images]."""
    names: PackedFile
    """File of the images' paths below `source`, bytes [images]."""


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """The index of a packed data set."""

    size: int
    """Side of the images in pixels."""
    classes: tuple[str, ...]
    parts: tuple[PackedPart, ...]
    source: str
    """Directory that was packed."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the index without `source`, so that it does not change if a directory moves."""
        content = {name: value for name, value in asdict(self).items() if name != "source"}
        return hashlib.sha256(json.dumps([VERSION, content]).encode()).hexdigest()

    @property
    def files(self) -> Iterator[PackedFile]:
        """All files except the index."""
        return (file for part in self.parts for file in (part.labels, part.names, part.pixels))


def write_index(directory: Path, index: PackIndex) -> None:
    """Write the index, whole or not at all. It completes the packed data set."""
    write_json(directory / INDEX, {"version": VERSION, "fingerprint": index.fingerprint, **asdict(index)})


def read_index(directory: Path) -> PackIndex:
    """Read the index. Raises UserError if it is missing, damaged, was edited, or has another version."""
    path = directory / INDEX
    # A script's ranks import this module, and their Python may lack msgspec.
    from msgspec import ValidationError, convert  # noqa: PLC0415

    try:
        content = json.loads(path.read_bytes())
        version, fingerprint = content.pop("version"), content.pop("fingerprint")
        index = convert(content, PackIndex) if version == VERSION else None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from error
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError) as error:
        raise UserError(f"{path} is damaged, or not an index of packed data: {AGAIN}") from error
    if index is None:
        raise UserError(f"{path} has version {version} instead of {VERSION}: pack the data again (hpc pack SRC DST)")
    if index.fingerprint != fingerprint:
        raise UserError(f"{path} is damaged or was edited, because its fingerprint differs: {AGAIN}")
    return index


def check_files(directory: Path, index: PackIndex) -> None:
    """Raise UserError if a file is missing or does not have its size in the index."""
    for file in index.files:
        path = directory / file.name
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: {AGAIN}") from error
        if size_bytes != file.bytes:
            raise UserError(f"{path} has {size_bytes} bytes instead of {file.bytes}: {AGAIN}")
