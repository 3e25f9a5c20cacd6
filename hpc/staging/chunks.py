"""Pieces of files: read from the source, written to the copy. Runs on compute nodes."""

import os
import threading

import xxhash

from hpc.core.errors import TorchrelayError
from hpc.staging.source import FileChunk, SourceListing

# A server that restarts, or a stale handle, is over in seconds.
_RETRY_SECONDS = (0.5, 2.0, 5.0)


def checksum(content: memoryview | bytes) -> str:
    """XXH3 with 128 bits: against disks and networks that err, at the speed of memory.

    It keeps nobody from forging a copy; but who can write into a copy can write into its manifest as well.
    """
    return str(xxhash.xxh3_128_hexdigest(content))


def new_checksum() -> xxhash.xxh3_128:
    """The same, for what does not come in one piece."""
    return xxhash.xxh3_128()


def read_piece(listing: SourceListing, piece: FileChunk, into: memoryview, cancelled: threading.Event) -> None:
    """Read a piece from the source, several times if need be.

    Args:
        listing: the files.
        piece: which one.
        into: as long as the piece.
        cancelled: ends the waiting for another try.

    Raises:
        TorchrelayError: it cannot be read, or the file is not what it was when it was listed.
    """
    file = listing.files[piece.file]
    path = f"{listing.base}/{file.name}"
    for pause in (*_RETRY_SECONDS, None):
        try:
            return _read_once(path, piece.offset, into, (file.size, file.modified_ns))
        except OSError as error:
            if pause is None or cancelled.wait(pause):
                raise TorchrelayError(
                    f"{path} could not be read on {os.uname().nodename} ({error.strerror or error}), "
                    f"{len(_RETRY_SECONDS) + 1} times: restore it, or leave that node out with --exclude"
                ) from error
    raise AssertionError


def _read_once(path: str, offset: int, into: memoryview, unchanged: tuple[int, int]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fill(descriptor, into, offset)  # if it has become shorter, the check says so
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (status.st_size, status.st_mtime_ns) != unchanged:
        raise TorchrelayError(
            f"{path} was changed while the data were being copied: wait until nobody writes to them any more, "
            "then submit again"
        )


def fill(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from there on until it is full or the file ends, and return how many bytes that were."""
    have = 0
    while have < len(into) and (got := os.preadv(descriptor, [into[have:]], offset + have)):
        have += got
    return have


def write(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of it there."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def write_piece(path: str, offset: int, content: memoryview, mode: int) -> None:
    """Write a part of a file, which need not be there yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        write(descriptor, content, offset)
    finally:
        os.close(descriptor)
