"""The index of a packed data set: what lies in which of its files. Runs everywhere; imports neither torch nor numpy.

A packed data set is a directory of `.npy` files and this index, which is written last: without it there is none.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.core.errors import UserError
from hpc.core.files import write_json

INDEX = "torchrelay-pack.json"
VERSION = 1
AGAIN = "copy the packed data again, or pack them again (python -m training.pack SRC DST)"


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """One file of a packed data set."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """The training, validation or test set."""

    name: str
    """train, val or test."""
    images: int
    corrupt: tuple[int, ...]
    """The places of images whose source could not be decoded: they are black here."""
    labels: PackedFile
    """int64 [images]"""
    names: PackedFile
    """Paths of the images below `source`, as bytes [images]."""
    shards: tuple[PackedFile, ...]
    """uint8 [n, size, size, 3]; n is the same for all but the last."""

    @property
    def files(self) -> tuple[PackedFile, ...]:
        """All of its files."""
        return (self.labels, self.names, *self.shards)


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """A packed data set."""

    size: int
    """Side of the images in pixels."""
    shard_images: int
    """Images in every shard but the last of a part."""
    classes: tuple[str, ...]
    """A class's number is its place."""
    parts: tuple[PackedPart, ...]
    source: str
    """The directory that was packed."""

    @property
    def fingerprint(self) -> str:
        """Of the content: not of where it came from, nor of where it lies."""
        content = {name: value for name, value in asdict(self).items() if name != "source"}
        return hashlib.sha256(json.dumps([VERSION, content]).encode()).hexdigest()

    @property
    def files(self) -> Iterator[PackedFile]:
        """All files but the index."""
        return (file for part in self.parts for file in part.files)


def write_index(directory: Path, index: PackIndex) -> None:
    """Complete a packed data set: write the index, whole or not at all."""
    write_json(directory / INDEX, {"version": VERSION, "fingerprint": index.fingerprint, **asdict(index)})


def read_index(directory: Path) -> PackIndex:
    """The index of a packed data set.

    Raises:
        UserError: it cannot be read, is torn, was edited, or is of another version.
    """
    path = directory / INDEX
    try:
        content = json.loads(path.read_bytes())
        version, fingerprint = content.pop("version"), content.pop("fingerprint")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is no index of packed data, or a torn one: {AGAIN}") from error
    if version != VERSION:
        raise UserError(f"{path} is of version {version}, and this is for version {VERSION}: pack the data again")
    try:
        index = _index(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no index of packed data, or a torn one: {AGAIN}") from error
    if index.fingerprint != fingerprint:
        raise UserError(f"{path} does not have its own fingerprint, so it is torn or was edited: {AGAIN}")
    return index


def _index(content: dict[str, Any]) -> PackIndex:
    parts = tuple(map(_part, content.pop("parts")))
    return PackIndex(classes=tuple(content.pop("classes")), parts=parts, **content)


def _part(content: dict[str, Any]) -> PackedPart:
    labels, names = (PackedFile(**content.pop(name)) for name in ("labels", "names"))
    shards = tuple(PackedFile(**shard) for shard in content.pop("shards"))
    return PackedPart(corrupt=tuple(content.pop("corrupt")), labels=labels, names=names, shards=shards, **content)


def check_files(directory: Path, index: PackIndex) -> None:
    """Make sure that all files are there and have their sizes.

    Raises:
        UserError: names the first that has not.
    """
    for file in index.files:
        path = directory / file.name
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: {AGAIN}") from error
        if found != file.bytes:
            raise UserError(f"{path} has {found} bytes instead of {file.bytes}: {AGAIN}")
