"""Chunks of files: reading them from the source, writing them to the copy, checksums. Runs on compute nodes."""

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import xxhash

from hpc.core.errors import TorchrelayError
from hpc.staging.source import FileChunk, SourceListing

# A restarting server or a stale NFS handle recovers within seconds.
_RETRY_SECONDS = (0.5, 2.0, 5.0)
_Result = TypeVar("_Result")


def checksum(content: memoryview | bytes) -> str:
    """XXH3 with 128 bits, as hex: detects errors of disks and networks, at the speed of memory.

    It does not detect forgery; but a process that can write to a copy can write to its manifest, too.
    """
    return str(xxhash.xxh3_128_hexdigest(content))


def read_chunk(listing: SourceListing, chunk: FileChunk, into: memoryview, cancelled: threading.Event) -> None:
    """Read a chunk from the source, and retry after errors.

    Args:
        listing: the files.
        chunk: the chunk to read.
        into: buffer of the chunk's length.
        cancelled: ends the retries.

    Raises:
        TorchrelayError: the file cannot be read, or has changed since it was listed.
    """
    file = listing.files[chunk.file]
    path = f"{listing.base}/{file.name}"

    def read() -> None:
        descriptor, filled = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
        try:
            # A file that has become shorter ends this loop early, and fails the check.
            while filled < len(into) and (count := os.preadv(descriptor, [into[filled:]], chunk.offset + filled)):
                filled += count
            check_unchanged(path, os.fstat(descriptor), (file.size, file.modified_ns))
        finally:
            os.close(descriptor)

    read_with_retries(path, read, cancelled)


def read_with_retries(path: str, read: Callable[[], _Result], cancelled: threading.Event) -> _Result:
    """Call `read` again after errors of shared storage.

    Raises:
        TorchrelayError: it failed every time.
    """
    for pause in (*_RETRY_SECONDS, None):
        try:
            return read()
        except OSError as error:
            if pause is None or cancelled.wait(pause):
                raise TorchrelayError(
                    f"{path} could not be read on {os.uname().nodename} ({error.strerror or error}), "
                    f"{len(_RETRY_SECONDS) + 1} times: restore it, or leave that node out with --exclude"
                ) from error
    raise AssertionError


def check_unchanged(path: str, status: os.stat_result, listed: tuple[int, int]) -> None:
    """Compare a file of the source with its size and its modification time (ns) when it was listed.

    Raises:
        TorchrelayError: it has changed.
    """
    if (status.st_size, status.st_mtime_ns) != listed:
        raise TorchrelayError(
            f"{path} was changed while the data were being copied: submit again when nothing writes to them any more"
        )


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of the content at an offset."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
