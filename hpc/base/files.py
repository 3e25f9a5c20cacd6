"""Writes files and directories atomically: no reader sees them half-written, and no crash or full disk leaves them so.

A file or directory is written under a temporary name in the same directory, flushed to disk, and renamed. Each log of
JSON lines has one writer, which appends each line with a single `write`. Runs everywhere.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc.base.errors import UserError

DEV_SHM = Path("/dev/shm")  # noqa: S108 - the directories below it are private

# Bytes to read from the end of a log for its last record: few at first, more if the record is not among them.
_TAILS_BYTES = (2**11, 2**14, 2**17, 2**20)
_LINES_PER_PARSE = 1000
# Logs are read in blocks, because a log may be larger than memory.
_BLOCK_BYTES = 2**20
# Suffix of the temporary name of a file or directory that is being written or removed.
_UNFINISHED = "tmp"
MOST = 1e15
"""Largest number to accept from a file, so that sums of such numbers are still finite, and valid JSON."""
UNSUPPORTED = frozenset({errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Error numbers of file systems without hard links, locks, or fsync of directories."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers if the storage is full, or a quota is used up."""
TEMPORARY = DISK_FULL | {errno.ESTALE, errno.EIO, errno.EROFS, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN}
"""Error numbers of problems that may pass: the storage is full or read-only, or its server does not answer.

ext4 becomes read-only after an error, until an administrator has repaired it. A soft NFS mount times out, a FUSE mount
loses its connection, and Lustre evicts a client."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Flush a directory to disk, if its file system can do that. Only then are renames in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Flush a file's content to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def refresh_nfs_cache(directory: Path) -> None:
    """Make files visible that other hosts have created in a directory.

    An NFS client remembers for up to a minute that a name does not exist. Opening the directory makes it ask the server
    again (nfs_lookup_verify_inode in Linux' fs/nfs/dir.c). Listing a directory opens it, too.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def expanded(typed: str | Path) -> Path:
    """Return a path that a user typed, with the home directory in place of `~` or `~NAME`.

    Raises UserError if that user does not exist.
    """
    try:
        return Path(typed).expanduser()
    except RuntimeError as error:
        name = Path(typed).parts[0]
        raise UserError(f"{typed}: there is no home directory {name}: write the whole path") from error


def nearest_existing(path: Path) -> Path:
    """Return an absolute path if it exists, else the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def modified(path: Path) -> float | None:
    """Return a file's modification time by its storage's clock; None without it. The open refreshes NFS's cache."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def storage_time(directory: Path) -> float:
    """Return the time by the clock of a directory's storage, or by this machine's clock if nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b".")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def can_write(directory: Path) -> bool:
    """Return whether a new file can be written in a directory now."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _temporary_file(path: Path, data: str | bytes | Iterable[str], mode: int) -> Iterator[Path]:
    """Yield a new file beside `path` with the data, flushed to disk. Remove it at the end if it was not renamed."""
    parts = (data,) if isinstance(data, str | bytes) else data
    temporary = _temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes | Iterable[str], mode: int = 0o644) -> None:
    """Create or replace a file: readers see all of the old content or all of the new. `data` may be several parts."""
    with _temporary_file(path, data, mode) as temporary:
        temporary.replace(path)
    fsync_directory(path.parent)


def write_exclusive(path: Path, data: str) -> bool:
    """Create a file with its whole content; return False if it exists. Of concurrent writers, only one gets True.

    The name is a hard link to a finished temporary file, because NFS creates hard links exclusively.
    """
    with _temporary_file(path, data, 0o644) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS may have made the link and lost only the reply: link(2) advises to check the link count.
            return temporary.stat().st_nlink == 2
    fsync_directory(path.parent)
    return True


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a new private directory under a temporary name, and rename it to `path` when the block ends.

    Makes missing parents. An error removes the directory, but not its parents. A kill leaves both (see `is_temporary`).

    Raises:
        FileExistsError: `path` exists when the block ends.
    """
    temporary = _temporary_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        _rename_exclusively(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(path.parent)


def _rename_exclusively(source: Path, path: Path) -> None:
    """Rename a directory that is not empty. Raises FileExistsError if the new name is taken."""
    # rename(2) would replace an empty directory.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    try:
        source.rename(path)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise


def is_temporary(path: Path) -> bool:
    """Return whether a path is the temporary name of an unfinished file or directory."""
    return bool(re.fullmatch(rf"\..+\.[0-9a-f]{{32}}\.{_UNFINISHED}", path.name))


def _temporary_name(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{_UNFINISHED}"


def remove_directory(path: Path) -> None:
    """Remove a directory, after renaming it, so that a kill leaves no incomplete directory under its name.

    Errors are ignored. A kill may leave a directory with a temporary name (see `is_temporary`).
    """
    with contextlib.suppress(OSError):
        path = path.rename(_temporary_name(path))
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path, pattern: str, is_abandoned: Callable[[Path], bool] = lambda _: True) -> None:
    """Remove the temporary files and directories that killed processes left in `parent`, which need not exist.

    `pattern` matches their names. `is_abandoned` returns False for a path that a live process still writes.
    """
    for temporary in parent.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if not is_abandoned(temporary):
                continue
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink()


def make_below(root: Path, directory: Path) -> None:
    """Make a directory and its missing parents below `root`, which must exist: a deleted run must not appear again."""
    for path in (*reversed(directory.relative_to(root).parents), directory.relative_to(root)):
        if path.name:
            (root / path).mkdir(exist_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as a JSON document, indented for people."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def json_line(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON, with its line break."""
    return json.dumps(record, separators=(",", ":")) + "\n"


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a log, as `append_line` does."""
    append_line(path, json_line(record))


def append_line(path: Path, line: str) -> None:
    """Append one line, which includes its line break, with a single write. Raises OSError if it does not fit.

    If a kill during an earlier append has left half a line, a line break comes first, so that only that line is lost.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (("\n" if torn else "") + line).encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, "only a part of the line could be written", str(path))
    finally:
        os.close(descriptor)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _parse_lines(lines: list[bytes]) -> list[dict[str, Any] | None]:
    try:
        # One call for all lines takes a third of the time of a call per line. A torn line makes it fail or merge lines.
        records = json.loads(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        records = []
    if len(records) == len(lines) and all(type(record) is dict for record in records):
        return list(records)
    return list(map(_parse_line, lines))


def _blocks_of_lines(path: Path | str) -> Iterator[list[bytes]]:
    try:
        file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115 - a poll reads thousands: a Path's open is slower
    except FileNotFoundError:
        return
    with file:
        while block := file.read(_BLOCK_BYTES):
            yield (block + file.readline()).splitlines()


def numbered_lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank; nothing if the log does not exist."""
    lines = (line for block in _blocks_of_lines(path) for line in block)
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def json_lines(path: Path | str) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line that is not blank, oldest first, and None for a torn line.

    Yields nothing if the log does not exist.
    """
    for block in _blocks_of_lines(path):
        lines = [line for line in block if line.strip()]
        for first in range(0, len(lines), _LINES_PER_PARSE):
            yield from _parse_lines(lines[first : first + _LINES_PER_PARSE])


def read_json_lines(path: Path | str) -> Iterator[dict[str, Any]]:
    """Return an iterator over a log's records without torn lines, oldest first; empty if the log does not exist."""
    return (record for record in json_lines(path) if record is not None)


def number_in(record: Mapping[str, Any], name: str) -> int | float | None:
    """Return the number in a field; None if it has none, or one over `MOST`. A script may have written NaN or text."""
    value: Any = record.get(name)
    return value if type(value) in {int, float} and -MOST <= value <= MOST else None


def last_json_line(path: Path, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any] | None:
    """Return the newest whole record that `wanted` accepts, in the last megabyte of a log; None if there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for tail_bytes in _TAILS_BYTES:
            file.seek(max(0, size - tail_bytes))
            records = (_parse_line(line) for line in reversed(file.read().splitlines()))
            found = next((record for record in records if record is not None and wanted(record)), None)
            if found is not None or tail_bytes >= size:
                return found
    return None


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it if a hard link is impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EMLINK, *UNSUPPORTED}:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def link_files(source: Path, target: Path) -> None:
    """Make the directory `target` with hard links to the files of `source`, or with copies if links are impossible."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        link_file(file, target / file.name)
