"""The manifest of a copy: its files with sizes and checksums, compared with the disk. Runs on compute nodes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc.core.files import write_atomic
from hpc.staging.chunks import new_checksum
from hpc.staging.copy_progress import stop_if
from hpc.staging.source import pack_records, unpack_records

_READ_BYTES = 4 * 2**20
_DESCRIBED_BYTES = 256 * 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CopiedFile(NamedTuple):
    """One file of a copy."""

    name: str
    size: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    """XXH3 (128 bits) of each chunk of `chunk_bytes`, the last one shorter."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files that a copy must have."""

    source: str
    boot: str
    """Boot id when the copy was last known to be intact: a power cut may lose what was not yet on the disk."""
    files: tuple[CopiedFile, ...]
    directories: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)


def boot_id() -> str:
    """The kernel's id of this boot of the machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a copy; None if it is missing or unreadable."""
    try:
        (source, boot), records = unpack_records((directory / "manifest").read_bytes())
        directories = tuple(record for record in records if isinstance(record, str))
        copied = (record for record in records if not isinstance(record, str))
        files = tuple(CopiedFile(name, size, chunk_bytes, tuple(sums)) for name, size, chunk_bytes, sums in copied)
        return Manifest(source=source, boot=boot, files=files, directories=directories)
    except (OSError, ValueError, TypeError):
        return None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a copy."""
    content = pack_records((manifest.source, manifest.boot), [*manifest.directories, *manifest.files])
    write_atomic(directory / "manifest", content, mode=0o600)


def size_of(path: Path) -> int | None:
    """Bytes of a file; None if it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_intact(path: Path, file: CopiedFile, stopped: Callable[[], bool]) -> bool:
    """Read a file from the disk, not from the page cache, and compare its size and checksums."""
    if size_of(path) != file.size:
        return False
    try:
        return _has_checksums(path, file, stopped)
    except OSError:
        return False  # a read error of the disk


def _has_checksums(path: Path, file: CopiedFile, stopped: Callable[[], bool]) -> bool:
    with path.open("rb", buffering=0) as content:
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for checksum in file.checksums:
            stop_if(stopped())
            if _checksum(content.fileno(), file.chunk_bytes) != checksum:
                return False
    return True


def _checksum(descriptor: int, count: int) -> str:
    digest = new_checksum()
    while count and (content := os.read(descriptor, min(count, _READ_BYTES))):
        digest.update(content)
        count -= len(content)
    return digest.hexdigest()


def describe_file(directory: Path, name: str, stopped: Callable[[], bool]) -> CopiedFile:
    """The entry of a file on the disk."""
    with (directory / name).open("rb", buffering=0) as content:
        size, checksums = os.fstat(content.fileno()).st_size, []
        for _ in range(0, size, _DESCRIBED_BYTES):
            stop_if(stopped())
            checksums.append(_checksum(content.fileno(), _DESCRIBED_BYTES))
        return CopiedFile(name, size, _DESCRIBED_BYTES, tuple(checksums))
