"""Lists the source of a data set, divides its files into batches, and reads the batches. Runs on compute nodes.

One node of a job lists the source and sends the listing to the others: on a shared file system, listing a million
files takes minutes.
"""

import hashlib
import itertools
import json
import os
import queue
import stat
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hpc.base.errors import TorchrelayError, UserError
from hpc.sources.source_files import ARCHIVES, inside_name, is_archive, read_with_retries
from jobs.staging.copy_progress import stop_if

# Enough threads to keep a parallel file system busy. One thread is enough for a local file system.
_LISTING_THREADS = 8
_LONGEST_NAME_BYTES, _RECORDS_PER_LINE = 150, 1000
# A batch is many small files or a part of a large one. A small data set has at least 64 batches if possible, so that
# every node has some to read.
_LARGEST_BATCH, _SMALLEST_BATCH, _BATCHES = 16 * 2**20, 2**20, 64


class SourceFile(NamedTuple):
    """One file of the data set."""

    name: str
    """Path relative to the source."""
    size: int
    modified_ns: int
    executable: bool


class FileChunk(NamedTuple):
    """A part of a file, or a whole file."""

    file: int
    """Index in the listing's files."""
    offset: int
    length: int


Batch = tuple[FileChunk, ...]


@dataclass(frozen=True, kw_only=True)
class SourceListing:
    """All files of a source, sorted by directory, and by name in each directory."""

    source: Path
    files: tuple[SourceFile, ...]
    directories: tuple[str, ...] = ()
    """Paths relative to the source. They are listed because one without files may be a class without images."""

    @property
    def is_archive(self) -> bool:
        """Whether the source is an archive, which is unpacked."""
        return self.source.name.endswith(ARCHIVES) and [file.name for file in self.files] == [self.source.name]

    @cached_property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def version(self) -> str:
        """Name of this version of the data set. It changes with the path, and with any file's name, size or time."""
        digest = hashlib.sha256(repr(str(self.source)).encode())
        for file in self.files:
            digest.update(repr(tuple(file)).encode())
        digest.update(repr(self.directories).encode())
        # The result must not be a hidden name, nor too long for file systems, even with what `CacheEntry` adds to it.
        name = os.fsencode(self.source.name)[:_LONGEST_NAME_BYTES].decode(errors="ignore").lstrip(".")
        return f"{name}-{digest.hexdigest()[:16]}"

    @cached_property
    def batch_bytes(self) -> int:
        """The most bytes that a batch, or a chunk of a file, may have."""
        return min(max(self.size // _BATCHES, _SMALLEST_BATCH), _LARGEST_BATCH)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The batches of the data set, each of which is read or fetched as a whole."""
        batches, batch, left = list[Batch](), list[FileChunk](), self.batch_bytes
        for number, file in enumerate(self.files):
            for offset in range(0, max(1, file.size), self.batch_bytes):  # also one chunk for an empty file
                length = min(self.batch_bytes, file.size - offset)
                if batch and length > left:
                    batches.append(tuple(batch))
                    batch, left = [], self.batch_bytes
                batch.append(FileChunk(number, offset, length))
                left -= length
        return (*batches, tuple(batch)) if batch else tuple(batches)

    def pack(self) -> bytes:
        """Return the bytes of the listing, to send to another node."""
        return pack_records(str(self.source), self.directories, self.files)

    @classmethod
    def unpack(cls, content: bytes) -> "SourceListing":
        """Return the listing from the bytes that `pack` has made.

        Raises TorchrelayError if a name leads out of the data set, or ValueError if the content is malformed.
        """
        source, directories, records = unpack_records(content)
        files = tuple(SourceFile(*record) for record in records)
        for name in (*directories, *(file.name for file in files)):
            inside_name(name)
        return cls(source=Path(source), files=files, directories=directories)


def pack_records(head: Any, directories: Sequence[str], files: Sequence[tuple[Any, ...]]) -> bytes:
    """Return compressed JSON lines. One document with a million files would hold the GIL and stop the heartbeats."""
    compressor, records = zlib.compressobj(level=1), (*directories, *files)
    groups = (records[first : first + _RECORDS_PER_LINE] for first in range(0, len(records), _RECORDS_PER_LINE))
    chunks = [compressor.compress(json.dumps(line).encode() + b"\n") for line in itertools.chain([head], groups)]
    return b"".join([*chunks, compressor.flush()])


def unpack_records(content: bytes) -> tuple[Any, tuple[str, ...], list[Any]]:
    """Return what `pack_records` packed, files as lists. Raises ValueError if the content is malformed."""
    try:
        head, *lines = zlib.decompress(content).splitlines()
    except zlib.error as error:
        raise ValueError(str(error)) from error
    records = [record for line in lines for record in json.loads(line)]
    directories = tuple(record for record in records if isinstance(record, str))
    return json.loads(head), directories, records[len(directories) :]


class _Directory(NamedTuple):
    name: str
    ancestors: tuple[tuple[int, int], ...]
    """Device and inode of each directory above this one."""


class SourceWalk:
    """Lists a source, several directories at a time."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._files: dict[str, list[SourceFile]] = {}
        """Files by directory relative to the source, whose own key is empty."""
        self._queue: queue.Queue[_Directory | None] = queue.Queue()
        self._errors = list[BaseException]()
        self.cancelled = threading.Event()
        """An event to set to end the walk."""
        self.found = 0
        """The approximate number of files and directories so far, which shows progress."""

    def run(self) -> SourceListing:
        """List everything. This waits for storage that hangs: call it in a thread that can be abandoned.

        Raises:
            StagingStopped: the walk was cancelled.
            UserError: the source contains something that cannot be copied.
            TorchrelayError: the source does not exist, or cannot be read.
        """
        source = self._source
        try:
            if is_archive(source):
                return SourceListing(source=source, files=(_file(source.name, source),))
            if not source.is_dir():
                raise TorchrelayError(f"{source} does not exist on this node: put the data on shared storage")
            self._walk()
        except OSError as error:
            raise TorchrelayError(
                f"{error.filename} cannot be listed ({error.strerror}): restore it, remove it, or give data without it"
            ) from error
        # Sort by directory: sorting ten million names at once holds the GIL for half a minute, and the node seems lost.
        directories = sorted(self._files)
        files = tuple(file for name in directories for file in self._files[name])
        return SourceListing(source=source, files=files, directories=tuple(directories[1:]))

    def _walk(self) -> None:
        self._queue.put(_Directory("", ()))
        for _ in range(_LISTING_THREADS):
            threading.Thread(target=self._work, daemon=True, name="stage-list").start()
        self._queue.join()
        for _ in range(_LISTING_THREADS):
            self._queue.put(None)
        stop_if(self.cancelled.is_set())
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        while (directory := self._queue.get()) is not None:
            try:
                if not self._is_over():
                    self._list(directory)
            except BaseException as error:  # noqa: BLE001 - `run` raises it again
                self._errors.append(error)
            self._queue.task_done()

    def _is_over(self) -> bool:
        return self.cancelled.is_set() or bool(self._errors)

    def _list(self, directory: _Directory) -> None:
        path = self._source / directory.name
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in directory.ancestors:
            raise UserError(f"{path} is a symlink to a directory above it: remove it")
        ancestors = (*directory.ancestors, identity)
        files = list[SourceFile]()
        with os.scandir(path) as entries:
            for entry in entries:
                if self._is_over():
                    break
                self.found += 1
                name = os.path.join(directory.name, entry.name)  # noqa: PTH118 - a million of them
                if entry.is_dir():
                    self._queue.put(_Directory(name, ancestors))
                else:
                    files.append(_file(name, entry))
        self._files[directory.name] = sorted(files)


def _file(name: str, entry: os.DirEntry[str] | Path) -> SourceFile:
    status = entry.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{os.fspath(entry)} is not a regular file ({stat.filemode(status.st_mode)}): remove it")
    return SourceFile(name, status.st_size, status.st_mtime_ns, bool(status.st_mode & stat.S_IXUSR))


def read_chunk(listing: SourceListing, chunk: FileChunk, into: memoryview, cancelled: threading.Event) -> None:
    """Read a chunk from the source into a buffer of its length. After errors, try again, as `read_with_retries` does.

    Raises TorchrelayError if the file cannot be read, or has changed since it was listed.
    """
    file = listing.files[chunk.file]
    path = f"{listing.source.parent if listing.is_archive else listing.source}/{file.name}"

    def read() -> None:
        descriptor, filled = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
        try:
            # A file that has become shorter ends this loop early, and the check fails.
            while filled < len(into) and (count := os.preadv(descriptor, [into[filled:]], chunk.offset + filled)):
                filled += count
            check_unchanged(path, os.fstat(descriptor), (file.size, file.modified_ns))
        finally:
            os.close(descriptor)

    read_with_retries(path, read, cancelled)


def check_unchanged(path: str, status: os.stat_result, listed: tuple[int, int]) -> None:
    """Raise TorchrelayError if a file of the source no longer has the listed size and modification time (ns)."""
    if (status.st_size, status.st_mtime_ns) != listed:
        raise TorchrelayError(
            f"{path} was changed while the data were being copied: submit again when nothing writes to them any more"
        )
