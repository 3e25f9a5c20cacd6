"""What is to be staged: the list of a data set's files, and how it is cut into pieces. Runs on compute nodes.

One node of a job lists the source; the others are told. Listing a million files takes a shared file system minutes.
"""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hpc.errors import TorchrelayError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
# Enough to keep a parallel file system busy; a local one answers one as fast.
_LISTING_THREADS = 8
_POLL_SECONDS = 0.2
# Many small files travel as one batch, and a large file as many. A small data set is cut finer, to have a part for
# every node.
_LARGEST_BATCH, _LEAST_BATCH, _BATCHES = 16 * 2**20, 2**20, 64


def is_archive(path: Path) -> bool:
    """Whether it is a file that is to be unpacked, by its name."""
    return path.name.endswith(ARCHIVES) and path.is_file()


class StagingStopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """Staging was asked to stop. What it had copied is not used; the next one removes it."""


def stop_if(asked: bool) -> None:
    """Stop staging, if somebody asked for it.

    Raises:
        StagingStopped: somebody did.
    """
    if asked:
        raise StagingStopped


class SourceFile(NamedTuple):
    """One file of the data set."""

    name: str
    """Its path below the source."""
    size: int
    modified_ns: int
    executable: bool


class Piece(NamedTuple):
    """A part of a file, or a whole one."""

    file: int
    """Its place in the listing."""
    offset: int
    length: int


Batch = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files of a source, in a fixed order."""

    source: Path
    files: tuple[SourceFile, ...]

    @property
    def is_archive(self) -> bool:
        """Whether the source is one file, to be unpacked."""
        return self.source.name.endswith(ARCHIVES) and [file.name for file in self.files] == [self.source.name]

    @property
    def base(self) -> Path:
        """The directory that the files' names are relative to."""
        return self.source.parent if self.is_archive else self.source

    @cached_property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def entry(self) -> str:
        """Names this version of the data set: another path, file, size or time is another one."""
        digest = hashlib.sha256(repr(str(self.source)).encode())
        for file in self.files:
            digest.update(repr(tuple(file)).encode())
        return f"{self.source.name}-{digest.hexdigest()[:16]}"

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The whole data set as what is read, sent and written in one go."""
        return tuple(_cut(self.files, min(max(self.size // _BATCHES, _LEAST_BATCH), _LARGEST_BATCH)))

    def pack(self) -> bytes:
        """As bytes, for another node."""
        return zlib.compress(json.dumps([str(self.source), self.files]).encode(), level=1)

    @classmethod
    def unpack(cls, content: bytes) -> "Listing":
        """What `pack` packed.

        Raises:
            TorchrelayError: a name leads out of the data set.
        """
        source, files = json.loads(zlib.decompress(content))
        listing = cls(source=Path(source), files=tuple(SourceFile(*file) for file in files))
        for file in listing.files:
            inside_name(file.name)
        return listing


def _cut(files: tuple[SourceFile, ...], most: int) -> Iterator[Batch]:
    batch, room = list[Piece](), most
    for number, file in enumerate(files):
        for offset in range(0, file.size, most) if file.size else (0,):
            length = min(most, file.size - offset)
            if batch and length > room:
                yield tuple(batch)
                batch, room = [], most
            batch.append(Piece(number, offset, length))
            room -= length
    if batch:
        yield tuple(batch)


def inside_name(name: str) -> str:
    """A path below a directory, without `.`.

    Raises:
        TorchrelayError: it is absolute, leads upwards, or is empty.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise TorchrelayError(f"{name!r} leads out of its directory: data with such a name are refused")
    return str(path)


def list_source(source: Path, stopped: Callable[[], bool] = lambda: False) -> Listing:
    """Look at every file of a directory, links followed, or at one archive.

    Raises:
        StagingStopped: `stopped` said yes.
        TorchrelayError: it is not there, or holds what cannot be copied.
    """
    try:
        if is_archive(source):
            return Listing(source=source, files=(_file(source.name, source),))
        if not source.is_dir():
            raise TorchrelayError(f"the data, {source}, are not to be seen on this node: keep them on shared storage")
        return Listing(source=source, files=tuple(sorted(_walk(source, stopped))))
    except OSError as error:
        raise TorchrelayError(
            f"{error.filename} cannot be listed ({error.strerror}): restore it, remove it, or give data without it"
        ) from error


class _Directory(NamedTuple):
    name: str
    above: tuple[tuple[int, int], ...]
    """Device and inode of the directories that it is in."""


def _walk(source: Path, stopped: Callable[[], bool]) -> list[SourceFile]:
    found = list[SourceFile]()
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        waiting: set[Future[tuple[list[SourceFile], list[_Directory]]]] = {
            pool.submit(_list_directory, source, _Directory("", ()))
        }
        try:
            while waiting:
                stop_if(stopped())
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                for files, directories in (future.result() for future in done):
                    found += files
                    waiting |= {pool.submit(_list_directory, source, directory) for directory in directories}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _list_directory(source: Path, directory: _Directory) -> tuple[list[SourceFile], list[_Directory]]:
    path = source / directory.name
    status = path.stat()
    place = (status.st_dev, status.st_ino)
    if place in directory.above:
        raise TorchrelayError(f"{path} is a link to a directory that it lies in: remove it")
    above = (*directory.above, place)
    files, directories = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            name = os.path.join(directory.name, entry.name)  # noqa: PTH118 - a million of them
            if entry.is_dir():
                directories.append(_Directory(name, above))
            else:
                files.append(_file(name, entry))
    return files, directories


def _file(name: str, entry: os.DirEntry[str] | Path) -> SourceFile:
    status = entry.stat()
    if not stat.S_ISREG(status.st_mode):
        raise TorchrelayError(f"{os.fspath(entry)} is no file ({stat.filemode(status.st_mode)}): remove it")
    return SourceFile(name, status.st_size, status.st_mtime_ns, bool(status.st_mode & stat.S_IXUSR))
