"""Writing files so that a reader, a crash or a full disk never sees half of one. Runs everywhere.

A whole file is written under a temporary name in the same directory, flushed to the disk and renamed; a
log of JSON lines is appended to with one `write` per line, by one process per file.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Of a log, how much is read to find its last record: a little, and more if it is not there.
_TAILS_BYTES = (2**11, 2**14, 2**17, 2**20)
_RECORDS_PER_PARSE = 1000
# How the names of a directory that is being written, and of one that is being replaced, end.
_UNFINISHED, _REPLACED = "tmp", "old"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is on the disk only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh_nfs_cache(directory: Path) -> None:
    """See the names that a directory of our own has now.

    NFS clients remember for up to a minute that a name was not there, unless the directory changes under their own
    hands; its mode is what it was before.
    """
    directory.chmod(0o700)


def _write_temporary(path: Path, data: bytes, mode: int) -> Path:
    """Put the data, durably, beside `path` under a name that nobody else uses. A failed write leaves nothing."""
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Replace or create a file: readers see the old one or the whole new one."""
    temporary = _write_temporary(path, data.encode() if isinstance(data, str) else data, mode)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_exclusive(path: Path, data: str | bytes, mode: int = 0o644) -> bool:
    """Create a file, whole, unless it exists; of several who try at once, one gets True.

    A hard link is the exclusive creation that NFS guarantees, and it shows the content together with the name.
    """
    temporary = _write_temporary(path, data.encode() if isinstance(data, str) else data, mode)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS the link may have been made and only the answer lost: link(2) says to look at the count.
        return temporary.stat().st_nlink == 2
    finally:
        temporary.unlink()
    fsync_directory(path.parent)
    return True


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, indented for people."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def json_line(record: dict[str, Any]) -> str:
    """One record as one line."""
    return json.dumps(record, separators=(",", ":")) + "\n"


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record with a single write, so that a kill between records tears none.

    A kill in the middle of an earlier append may have left half a line: it is closed off first, so that it
    spoils itself alone.

    Raises:
        OSError: the line is not there, or not whole.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (("\n" if torn else "") + json_line(record)).encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, "only a part of the line could be written", str(path))
    finally:
        os.close(descriptor)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None for a torn one (a kill, a full disk): it never happened."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _records(lines: list[bytes]) -> list[dict[str, Any]]:
    """The records on some lines, without the torn ones."""
    try:
        # In one go it takes a third of the time. A torn line spoils that, or joins with its neighbours.
        records = json.loads(b"[%b]" % b",".join(lines))
    except ValueError:
        records = []
    if len(records) == len(lines) and all(type(record) is dict for record in records):
        return list(records)
    return [record for line in lines if (record := _record(line)) is not None]


def read_json_lines(path: Path | str) -> Iterator[dict[str, Any]]:
    """Every whole record of a log, the oldest first; none if there is no log."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a poll reads thousands: a Path's open is slower
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for first in range(0, len(lines), _RECORDS_PER_PARSE):
        yield from _records(lines[first : first + _RECORDS_PER_PARSE])


def last_json_line(path: Path, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any] | None:
    """The newest whole record of a log, of those that are wanted; reads of its tail no more than is needed.

    One that lies more than a megabyte before the end is not found.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for tail_bytes in _TAILS_BYTES:
            file.seek(max(0, size - tail_bytes))
            records = (_record(line) for line in reversed(file.read().splitlines()))
            found = next((record for record in records if record is not None and wanted(record)), None)
            if found is not None or tail_bytes >= size:
                return found
    return None


def publish_directory(path: Path, fill: Callable[[Path], None], mode: int | None = None) -> None:
    """Create or replace a directory of files. An older one is deleted after the new one is in its place.

    Args:
        path: the directory.
        fill: is given an empty directory to write the files into; the writing need not be durable.
        mode: of the directory, and of its files as far as it suits files; by default as the process makes them.

    Raises:
        OSError: the disk is full, for example. Nothing is left behind, and an older directory is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, _UNFINISHED)
    try:
        temporary.mkdir(mode=0o777 if mode is None else mode)
        fill(temporary)
        for file in temporary.iterdir():
            if mode is not None:
                file.chmod(mode & 0o666)
            fsync_file(file)
        fsync_directory(temporary)
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _aside(path: Path, ending: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{ending}"


def fsync_file(path: Path) -> None:
    """Have a file's bytes on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(new: Path, path: Path) -> None:
    """A directory cannot be renamed onto a full one: the old one steps aside first."""
    old = _aside(path, _REPLACED) if path.exists() else None
    if old:
        path.rename(old)
    new.rename(path)
    fsync_directory(path.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def remove_temporaries(parent: Path, pattern: str) -> None:
    """Remove what killed writers of `pattern` left in `parent`, and put back what had stepped aside for nothing.

    Args:
        parent: the directory to clean; it need not exist.
        pattern: the names that are published there, such as `step-*`.
    """
    for old in sorted(parent.glob(f".{pattern}.*.{_REPLACED}")):
        path = parent / old.name[1:].rsplit(".", 2)[0]
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    remove_abandoned(parent, f".{pattern}.*.{_UNFINISHED}")


def remove_abandoned(parent: Path, pattern: str, is_abandoned: Callable[[Path], bool] = lambda _: True) -> None:
    """Remove the temporary files and directories of killed processes.

    Args:
        parent: the directory to clean; it need not exist.
        pattern: glob of the temporary names.
        is_abandoned: whether no live process still writes one; by default always true.
    """
    for temporary in parent.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            if not is_abandoned(temporary):
                continue
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink()
