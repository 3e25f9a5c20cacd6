"""What is to be staged: the list of a data set's files, and how it is cut into pieces. Runs on compute nodes.

One node of a job lists the source; the others are told. Listing a million files takes a shared file system minutes.
"""

import hashlib
import itertools
import json
import os
import queue
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hpc.core.errors import TorchrelayError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
# Enough to keep a parallel file system busy; a local one answers one as fast.
_LISTING_THREADS = 8
_POLL_SECONDS = 0.2
# Many small files travel as one batch, and a large file as many. A small data set is cut finer, to have a part for
# every node.
_LONGEST_NAME, _TOGETHER = 200, 1000
_LARGEST_BATCH, _LEAST_BATCH, _BATCHES = 16 * 2**20, 2**20, 64


def absolute(path: Path) -> Path:
    """A source by its one name: two names are two copies. Links stay, for one may name the version that is used now."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - pathlib leaves `..` in


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


class FileChunk(NamedTuple):
    """A part of a file, or a whole one."""

    file: int
    """Its place in the listing."""
    offset: int
    length: int


Batch = tuple[FileChunk, ...]


@dataclass(frozen=True, kw_only=True)
class SourceListing:
    """All files of a source, in a fixed order."""

    source: Path
    files: tuple[SourceFile, ...]
    directories: tuple[str, ...] = ()
    """Those below the source, by path: one without a file may be a class without an image."""

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
        digest.update(repr(self.directories).encode())
        # Neither hidden nor longer than a file system takes.
        return f"{self.source.name.lstrip('.')[:_LONGEST_NAME]}-{digest.hexdigest()[:16]}"

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The whole data set as what is read, sent and written in one go."""
        return tuple(_cut(self.files, min(max(self.size // _BATCHES, _LEAST_BATCH), _LARGEST_BATCH)))

    def pack(self) -> bytes:
        """As bytes, for another node."""
        return pack_records(str(self.source), [*self.directories, *self.files])

    @classmethod
    def unpack(cls, content: bytes) -> "SourceListing":
        """What `pack` packed.

        Raises:
            TorchrelayError: a name leads out of the data set.
            ValueError: the content is something else.
        """
        source, records = unpack_records(content)
        files = tuple(SourceFile(*record) for record in records if not isinstance(record, str))
        directories = tuple(record for record in records if isinstance(record, str))
        for name in (*directories, *(file.name for file in files)):
            inside_name(name)
        return cls(source=Path(source), files=files, directories=directories)


def pack_records(head: Any, records: Sequence[Any]) -> bytes:
    """JSON lines, compressed: a million in one go would hold Python's lock for longer than a node may be silent."""
    compressor = zlib.compressobj(level=1)
    groups = (records[first : first + _TOGETHER] for first in range(0, len(records), _TOGETHER))
    chunks = [compressor.compress(json.dumps(line).encode() + b"\n") for line in itertools.chain([head], groups)]
    return b"".join([*chunks, compressor.flush()])


def unpack_records(content: bytes) -> tuple[Any, list[Any]]:
    """What `pack_records` packed.

    Raises:
        ValueError: the content is something else.
    """
    try:
        head, *lines = zlib.decompress(content).splitlines()
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return json.loads(head), [record for line in lines for record in json.loads(line)]


def _cut(files: tuple[SourceFile, ...], most: int) -> Iterator[Batch]:
    batch, room = list[FileChunk](), most
    for number, file in enumerate(files):
        for offset in range(0, file.size, most) if file.size else (0,):
            length = min(most, file.size - offset)
            if batch and length > room:
                yield tuple(batch)
                batch, room = [], most
            batch.append(FileChunk(number, offset, length))
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


def list_source(source: Path, stopped: Callable[[], bool] = lambda: False) -> SourceListing:
    """Look at every file of a directory, links followed, or at one archive.

    Raises:
        StagingStopped: `stopped` said yes.
        TorchrelayError: it is not there, or holds what cannot be copied.
    """
    try:
        if is_archive(source):
            return SourceListing(source=source, files=(_file(source.name, source),))
        if not source.is_dir():
            raise TorchrelayError(f"the data, {source}, are not to be seen on this node: keep them on shared storage")
        walk = _Walk(source)
        walk.run(stopped)
    except OSError as error:
        raise TorchrelayError(
            f"{error.filename} cannot be listed ({error.strerror}): restore it, remove it, or give data without it"
        ) from error
    return SourceListing(source=source, files=tuple(sorted(walk.files)), directories=tuple(sorted(walk.directories)))


class _Directory(NamedTuple):
    name: str
    above: tuple[tuple[int, int], ...]
    """Device and inode of the directories that it is in."""


class _Walk:
    """A look at every directory, several at a time, in threads that nobody has to wait for: storage may hang."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.files, self.directories = list[SourceFile](), list[str]()
        self._waiting: queue.SimpleQueue[_Directory] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left, self._error = 0, list[BaseException]()
        self._ended = threading.Event()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Look at everything."""
        self._add([_Directory("", ())])
        for _ in range(_LISTING_THREADS):
            threading.Thread(target=self._work, daemon=True, name="stage-list").start()
        try:
            with self._changed:
                while self._left and not self._error:
                    self._changed.wait(_POLL_SECONDS)
                    stop_if(stopped())
        finally:
            self._ended.set()
        if self._error:
            raise self._error[0]

    def _add(self, directories: list[_Directory]) -> None:
        self._left += len(directories)
        for directory in directories:
            self._waiting.put(directory)

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                directory = self._waiting.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            try:
                files, directories = self._list(directory)
            except BaseException as error:  # noqa: BLE001 - it is raised again where the list was asked for
                self._error.append(error)
                files, directories = [], []
            with self._changed:
                self.files += files
                self.directories += [found.name for found in directories]
                self._add(directories)
                self._left -= 1
                self._changed.notify_all()

    def _list(self, directory: _Directory) -> tuple[list[SourceFile], list[_Directory]]:
        path = self._source / directory.name
        status = path.stat()
        place = (status.st_dev, status.st_ino)
        if place in directory.above:
            raise TorchrelayError(f"{path} is a link to a directory that it lies in: remove it")
        above = (*directory.above, place)
        files, directories = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if self._ended.is_set():
                    break
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
