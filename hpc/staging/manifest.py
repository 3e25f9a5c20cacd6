"""What a copy must be: a list of its files with sizes and checksums. Runs on compute nodes."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc.core.files import write_atomic
from hpc.staging.chunks import new_checksum
from hpc.staging.source import pack_records, stop_if, unpack_records

_CHUNK_BYTES = 4 * 2**20
# The first line of a manifest is in these.
_HEAD_BYTES = 2**16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CopiedFile(NamedTuple):
    """One file of a copy."""

    name: str
    size: int
    piece_bytes: int
    checksums: tuple[str, ...]
    """XXH3 (128 bits) of each piece of `piece_bytes`, the last one shorter."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a copy must be."""

    source: str
    boot: str
    """Of the machine when the copy was last known to be whole: a power cut may have lost what was not on the disk."""
    files: tuple[CopiedFile, ...]
    directories: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)


def boot_id() -> str:
    """Names the time since the machine was started."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def read_manifest(directory: Path) -> Manifest | None:
    """What a copy must be; None if it is not there, or nobody can say what it must be."""
    try:
        (source, boot, _), records = unpack_records((directory / "manifest").read_bytes())
        directories = tuple(record for record in records if isinstance(record, str))
        copied = (record for record in records if not isinstance(record, str))
        files = tuple(CopiedFile(name, size, piece_bytes, tuple(sums)) for name, size, piece_bytes, sums in copied)
        return Manifest(source=source, boot=boot, files=files, directories=directories)
    except (OSError, ValueError, TypeError):
        return None


def read_size(directory: Path) -> int:
    """Bytes in all files of a copy, which takes no look at each; 0 if nobody can say."""
    try:
        with (directory / "manifest").open("rb") as file:
            head = zlib.decompressobj().decompress(file.read(_HEAD_BYTES))
        return int(json.loads(head.splitlines()[0])[2])
    except (OSError, ValueError, TypeError, IndexError, zlib.error):
        return 0


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it down, whole."""
    head = (manifest.source, manifest.boot, manifest.size)
    content = pack_records(head, [*manifest.directories, *manifest.files])
    write_atomic(directory / "manifest", content, mode=0o600)


def size_of(path: Path) -> int | None:
    """Bytes of a file; None if there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_intact(path: Path, file: CopiedFile, stopped: Callable[[], bool]) -> bool:
    """Read a file from the disk, not from the kernel's memory of it, and compare."""
    if size_of(path) != file.size:
        return False
    try:
        return _is_as_told(path, file, stopped)
    except OSError:
        return False  # the disk does not give it back


def _is_as_told(path: Path, file: CopiedFile, stopped: Callable[[], bool]) -> bool:
    with path.open("rb", buffering=0) as content:
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for checksum in file.checksums:
            stop_if(stopped())
            if _digest(content.fileno(), file.piece_bytes) != checksum:
                return False
    return True


def _digest(descriptor: int, count: int) -> str:
    digest = new_checksum()
    while count and (chunk := os.read(descriptor, min(count, _CHUNK_BYTES))):
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


def copied_whole(directory: Path, name: str) -> CopiedFile:
    """A file that is there, as it is, in one piece."""
    with (directory / name).open("rb", buffering=0) as content:
        size = os.fstat(content.fileno()).st_size
        return CopiedFile(name, size, max(1, size), (_digest(content.fileno(), size),))
