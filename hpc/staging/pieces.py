"""Pieces of files: read from the source, written to the copy. Runs on compute nodes."""

import os
import threading
from pathlib import Path

from hpc.errors import TorchrelayError
from hpc.staging.source import Listing, Piece

# A server that restarts, or a stale handle, is over in seconds.
_RETRY_SECONDS = (0.5, 2.0, 5.0)


def read_piece(listing: Listing, piece: Piece, cancelled: threading.Event) -> bytearray:
    """Read a piece from the source, several times if need be.

    Raises:
        TorchrelayError: it cannot be read, or the file is not what it was when it was listed.
    """
    file = listing.files[piece.file]
    path = listing.base / file.name
    for pause in (*_RETRY_SECONDS, None):
        try:
            return _read_once(path, piece, file.size, file.modified_ns)
        except OSError as error:
            if pause is None or cancelled.wait(pause):
                raise TorchrelayError(
                    f"{path} could not be read on {os.uname().nodename} ({error.strerror or error}), "
                    f"{len(_RETRY_SECONDS) + 1} times: restore it, or leave that node out with --exclude"
                ) from error
    raise AssertionError


def _read_once(path: Path, piece: Piece, size: int, modified_ns: int) -> bytearray:
    content = bytearray(piece.length)
    view, have = memoryview(content), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check_unchanged(path, descriptor, size, modified_ns)
        while have < piece.length:
            got = os.preadv(descriptor, [view[have:]], piece.offset + have)
            if not got:
                break  # it has become shorter: the check says so
            have += got
        _check_unchanged(path, descriptor, size, modified_ns)
    finally:
        os.close(descriptor)
    return content


def _check_unchanged(path: Path, descriptor: int, size: int, modified_ns: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_size, status.st_mtime_ns) != (size, modified_ns):
        raise TorchrelayError(
            f"{path} was changed while the data were being copied: wait until nobody writes to them any more, "
            "then submit again"
        )


def write_piece(path: Path, offset: int, content: memoryview, mode: int) -> None:
    """Write a part of a file, which need not be there yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        while content:
            written = os.pwrite(descriptor, content, offset)
            content, offset = content[written:], offset + written
    finally:
        os.close(descriptor)
