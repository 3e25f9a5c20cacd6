"""Reads logs of any size: in blocks, and only new lines; or only the end. Runs on the login node."""

import errno
import functools
import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hpc.base.traceback_text import exception_lines
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded
from hpc.run.rundir import RunDir
from hpc.status.summary import LastOutput

_BLOCK_BYTES = 2**17
# How much of the end of a log is searched for a traceback, and how much is shown.
_TAIL_BYTES = 65536
_MOST_LINES, _MOST_CHARACTERS = 40, 200
# Errors of reading a file that this machine or another NFS client has deleted meanwhile.
_DELETED = {errno.ENOENT, errno.ESTALE}
# Most programs, and Python's logging, write times as 2026-11-21 09:00:05,123. torch writes W1121 09:00:05.123456.
_TIME = re.compile(r"\W{0,2}(?:(\d{4}-)(\d\d)-(\d\d)[T ]|[A-Z](\d\d)(\d\d) )(\d\d:\d\d:\d\d(?:[.,]\d+)?)")

Line = dict[str, int | float | str | None]


@dataclass
class Tail:
    """One log and its read position. The file is not kept open: there may be a thousand ranks."""

    path: Path
    offset: int = 0
    time: str = ""
    """Time of the newest line that begins with a time, as text without the year. Such texts sort like the times."""
    _file: tuple[int, int] | None = None
    _rest: bytes = b""

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """Yield new lines; with `ended` also the text after the last line break.

        A log that was replaced or truncated is read from its beginning; a missing one has no lines.
        """
        while block := self._block():
            *whole, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > _BLOCK_BYTES:  # not a line of text: cut it, to save memory
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
            if error.errno not in _DELETED:
                raise
            return b""
        self.offset += len(block)
        return block


def _read(path: Path, offset: int, size: int = _BLOCK_BYTES) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def _visible(line: bytes) -> str:
    """Return a line as a terminal shows it, without the text that a progress bar has overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def merged(tails: Iterable[Tail], *, ended: bool = False) -> Iterator[tuple[Tail, str]]:
    """Yield each new line of several logs, with its log, in the order of the times with which lines begin.

    A line without a time follows the line before it in its log. Logs without times come one after the other.
    """

    def timed(tail: Tail) -> Iterator[tuple[str, Tail, str]]:
        for line in tail.lines(ended=ended):
            if found := _TIME.match(line):
                tail.time = "".join(part.replace(",", ".") for part in found.groups()[1:] if part)
            yield tail.time, tail, line

    return (entry[1:] for entry in heapq.merge(*map(timed, tails), key=lambda entry: entry[0]))


def time_of(line: str) -> float | None:
    """Return the time at the beginning of a line, in seconds since the epoch; None if it has no time, or no year."""
    found = _TIME.match(line)
    try:
        return datetime.fromisoformat(line[found.start(1) : found.end()]).timestamp() if found and found[1] else None
    except ValueError:  # such as month 13
        return None


def offset_of_last(path: Path, text: str) -> int | None:
    """Return the offset of a text's last occurrence in a log; None if the text or the log is missing."""
    wanted, after = text.encode(), b""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    for offset in range((size - 1) // _BLOCK_BYTES * _BLOCK_BYTES, -1, -_BLOCK_BYTES):
        block = _read(path, offset)
        if (found := (block + after).rfind(wanted)) >= 0:
            return offset + found
        after = block[: len(wanted)]
    return None


def lines_before(path: Path, offset: int, count: int) -> int:
    """Return the offset of the line that is `count` lines before the line at `offset`, but at most a block before."""
    first = max(0, offset - _BLOCK_BYTES)
    before = _read(path, first, offset - first)
    end = len(before)
    for _ in range(count + 1):
        end = before.rfind(b"\n", 0, end)
        if end < 0:
            return first
    return first + end + 1


@dataclass
class LogReader:
    """Reads the new lines of a run's logs. If `rank` or `attempt` is None, it reads all ranks or attempts."""

    run: RunDir
    rank: int | None = None
    attempt: int | None = None
    most_bytes: int | None = None
    """Largest number of bytes to read from the end of each log. None means the whole log."""
    shortened: bool = False
    """Whether a part of a log was left out because of `most_bytes`."""
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _over: set[int] = field(default_factory=set)

    def new_lines(self, *, ended: bool = False) -> Iterator[Line]:
        """Yield the lines added since the last call, each with its origin."""
        numbers = [_numbers(path)[0] for path in self.run.logs.glob("attempt-[0-9]*")]
        attempts = sorted(one for one in numbers if self.attempt in {one, None} and one not in self._over)
        # There may be thousands of old attempts, so their logs are read only once. Ranks of the last two may yet print.
        over = attempts[:-2]
        rank = "[0-9]*" if self.rank is None else f"{self.rank:02d}"
        groups = [(number, self.run.attempt_logs(number).glob(f"rank-{rank}.log")) for number in attempts]
        if self.rank is None and self.attempt is None:
            # An agent's log belongs to a job, which may have several attempts, so a chosen attempt or rank excludes it.
            groups.insert(0, (0, self.run.logs.glob("[0-9]*_[0-9]*_log.out")))
        for number, paths in groups:
            tails = map(self._tail, sorted(paths, key=_numbers))
            for tail, line in merged(tails, ended=ended or number in over):
                yield {**origin_of(tail.path), "time": time_of(line), "line": line}
        self._over.update(over)

    def start_at(self, path: Path, offset: int) -> None:
        """Start to read a log at an offset."""
        self._tails[path] = Tail(path, offset)

    def _tail(self, path: Path) -> Tail:
        if path not in self._tails:
            size = path.stat().st_size if self.most_bytes and path.exists() else 0
            skipped = max(0, size - (self.most_bytes or size))
            self.shortened = self.shortened or skipped > 0
            self.start_at(path, lines_before(path, skipped, 0) if skipped else 0)
        return self._tails[path]


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


@functools.cache
def origin_of(path: Path) -> Line:
    """Return the attempt and rank that a log's path names; for submitit's log of an agent, the job and node."""
    if path.suffix == ".out":
        job, node = _numbers(path)
        return {"agent": f"job {job}", "node": node}
    return {"attempt": _numbers(path.parent)[0], "rank": _numbers(path)[0]}


# --- the end of a rank's log ---


def last_traceback(run: RunDir, history: History) -> list[str] | None:
    """Return the last exception in the log of the rank that ended the last attempt; None if there is none."""
    end = history.last(AttemptEnded)
    if end is None or end.rank is None:
        return None
    found = exception_lines(_tail(run.rank_log(end.attempt, end.rank)))
    if not found:
        return None
    return found if len(found) <= _MOST_LINES else [found[0], "  ...", *found[2 - _MOST_LINES :]]


def last_output(run: RunDir, attempt: int) -> LastOutput | None:
    """Return rank 0's last line and its time, in seconds since the epoch; None if rank 0 has printed nothing."""
    log = run.rank_log(attempt, 0)
    words = [line.strip() for line in _tail(log) if line.strip()]
    if not words:
        return None
    return LastOutput(line=words[-1][:_MOST_CHARACTERS], time=log.stat().st_mtime)


def _tail(log: Path) -> list[str]:
    try:
        return _read(log, max(0, log.stat().st_size - _TAIL_BYTES), _TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
