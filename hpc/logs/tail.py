"""Reading logs that grow, of any size: in blocks, and only what is new. Runs on the login node."""

import errno
import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

_BLOCK_BYTES = 2**17
# A file that was deleted while it was read, here or by another client of NFS.
_GONE = {errno.ENOENT, errno.ESTALE}
# As Python's logging and most others write it: 2026-11-21 09:00:05,123; and as torch does: W1121 09:00:05.123456.
_TIME = re.compile(r"\W{0,2}(?:\d{4}-(\d\d)-(\d\d)[T ]|[A-Z](\d\d)(\d\d) )(\d\d:\d\d:\d\d(?:[.,]\d+)?)")


@dataclass
class Tail:
    """One log, and how far it has been read. Holds no file open: there may be a thousand ranks."""

    path: Path
    offset: int = 0
    time: str = ""
    """The last time that one of its lines began with; times compare as text."""
    _file: tuple[int, int] | None = None
    _rest: bytes = b""

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """What is new, line by line; with `ended` also what stands behind the last line break.

        A log that was replaced or cut short is read from its beginning; one that is not there has no lines.
        """
        while block := self._block():
            *whole, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > _BLOCK_BYTES:  # no line of text: it is cut somewhere, rather than kept in memory
                whole, self._rest = [*whole, self._rest], b""
            yield from map(_visible, whole)
        if ended and self._rest:
            yield _visible(self._rest)
            self._rest = b""

    def _block(self) -> bytes:
        try:
            status = self.path.stat()
            file = status.st_dev, status.st_ino
            if self._file not in {file, None} or status.st_size < self.offset:
                self.offset, self._rest = 0, b""
            self._file = file
            block = b"" if status.st_size == self.offset else _read(self.path, self.offset)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return b""
        self.offset += len(block)
        return block


def _read(path: Path, offset: int, size: int = _BLOCK_BYTES) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def _visible(line: bytes) -> str:
    """A line as a terminal would show it: what a progress bar has drawn over is gone."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def merged(tails: Iterable[Tail], *, ended: bool = False) -> Iterator[tuple[Tail, str]]:
    """The new lines of several logs, in the order of the times that they begin with.

    A line without a time stays with the one before it. Where there are no times, one log comes after the other.
    """
    timed = heapq.merge(*(_timed(tail, ended=ended) for tail in tails), key=lambda entry: entry[0])
    return ((tail, line) for _, tail, line in timed)


def _timed(tail: Tail, *, ended: bool) -> Iterator[tuple[str, Tail, str]]:
    for line in tail.lines(ended=ended):
        if found := _TIME.match(line):
            tail.time = "".join(part.replace(",", ".") for part in found.groups() if part)
        yield tail.time, tail, line


def offset_of_last(path: Path, text: str) -> int | None:
    """Where a text stands in a log for the last time; reads from the end. None if it does not, or there is no log."""
    wanted, after = text.encode(), b""
    for offset in _backwards(path):
        block = _read(path, offset, _BLOCK_BYTES)
        if (found := (block + after).rfind(wanted)) >= 0:
            return offset + found
        after = block[: len(wanted)]
    return None


def _backwards(path: Path) -> Iterator[int]:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    yield from range((size - 1) // _BLOCK_BYTES * _BLOCK_BYTES, -1, -_BLOCK_BYTES)


def lines_before(path: Path, offset: int, count: int) -> int:
    """Where the line begins that stands so many lines before the one at `offset`; no further back than a block."""
    first = max(0, offset - _BLOCK_BYTES)
    before = _read(path, first, offset - first)
    end = len(before)
    for _ in repeat(None, count + 1):
        end = before.rfind(b"\n", 0, end)
        if end < 0:
            return first
    return first + end + 1
