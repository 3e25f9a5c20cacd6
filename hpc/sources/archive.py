"""Reads tar and zip archives that may be damaged or hostile. Runs on the login node and on compute nodes.

Python's own safe extraction, tarfile's data filter, is missing from Debian 12's Python 3.11.2; it also accepts archives
that end early, and knows no zip archives. So tarfile and zipfile only read, and `jobs.staging.unpack_archive` writes.
"""

import bz2
import errno
import gzip
import io
import lzma
import stat
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from hpc.base.errors import TorchrelayError, UserError
from hpc.sources.source_files import read_with_retries
from hpc.sources.zstd import ZstdError, ZstdFile

_BUFFER_BYTES = 2**18
_LONGEST_LINK = 4096
# A tar archive of this size is read in seconds.
_QUICK_BYTES = 2**26
# RuntimeError means that the archive is encrypted, compressed in an unknown way, or nested too deeply.
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, ZstdError, EOFError, ValueError,
    RuntimeError, OverflowError,
)  # fmt: skip
# Decompressors raise an OSError without errno; an error of the disk has an errno.
_DAMAGE_ERRNO = frozenset({None, errno.ENAMETOOLONG})
# The first bytes of a file identify its compression. tarfile would decompress gzip itself, but not verify its checksum.
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open, b"\x28\xb5\x2f\xfd": ZstdFile,
}  # fmt: skip
_ZIP_TYPES = {
    0: tarfile.REGTYPE, stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE
}  # fmt: skip
Read = Callable[[int], bytes]
"""Function that returns the next bytes of a member. Call it before taking the next member."""


def check(archive: Path) -> None:
    """Open an archive and read its first header. Raises TorchrelayError if it is damaged, unreadable, or no archive."""
    with damage_reported(archive), members_of(archive) as members:
        next(members, None)


def checked(path: Path) -> Path:
    """Return the absolute path of the archive that --data names. Raises UserError if `check` refuses it."""
    try:
        check(path)
    except (TorchrelayError, OSError) as error:
        raise UserError(f"--data is {path}: {error}") from error
    return path.absolute()


def quick_names(archive: Path) -> list[str] | None:
    """Return the names of the files and directories in an archive; None if that takes long, or if it holds links."""
    with damage_reported(archive):
        if archive.suffix == ".zip":  # its names are all at its end, and `check` has read them
            with _RetryingFile(archive) as raw, zipfile.ZipFile(raw) as zipped:
                members = zipped.infolist()
                is_linked = any(stat.S_ISLNK(member.external_attr >> 16) for member in members)
                return None if is_linked else [member.filename for member in members]
        if archive.stat().st_size > _QUICK_BYTES:
            return None
        names = []
        with members_of(archive) as entries:
            for member, _ in entries:
                if member.issym():
                    return None
                names.append(f"{member.name}/" if member.isdir() else member.name)
        return names


@contextmanager
def damage_reported(archive: Path) -> Iterator[None]:
    """Turn errors that a damaged archive causes into a TorchrelayError."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE_ERRNO:
            raise
        raise TorchrelayError(
            f"{archive.name} cannot be unpacked ({error}): is it complete? Create it again"
        ) from error


class _TarInfo(tarfile.TarInfo):
    """A tar header. Reading it fails if tarfile would take damage for the archive's end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed lacks it
            # Read on to the end of the file, where decompressors verify their checksums.
            while block := tar.fileobj.read(_BUFFER_BYTES):
                if block.count(0) < len(block):
                    raise tarfile.ReadError(f"it ends at byte {tar.offset}, but more data follow") from None
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error


class _RetryingFile(io.FileIO):
    """An archive file that retries reads after errors, because it may be on shared storage."""

    def read(self, size: int | None = -1) -> bytes:
        return read_with_retries(str(self.name), partial(super().read, size), threading.Event()) or b""


@contextmanager
def members_of(archive: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, Read]]]:
    """Yield the members of an archive. TarInfo describes the members of a zip archive, too."""
    with _RetryingFile(archive) as raw:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(raw) as zipped:
                yield (_zip_member(zipped, info) for info in zipped.infolist())
            return
        head = raw.read(8)
        raw.seek(0)
        decompress = next((opener for magic, opener in _DECOMPRESSORS.items() if head.startswith(magic)), None)
        mode, stream = ("r|", decompress(raw)) if decompress else ("r:", raw)
        # typeshed allows only literal modes.
        with stream, tarfile.open(fileobj=stream, mode=mode, bufsize=_BUFFER_BYTES, tarinfo=_TarInfo) as tar:  # type: ignore[call-overload]
            yield _tar_members(tar)


def _tar_members(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, Read]]:
    for info in tar:
        # After a header, the file is at the member's content, which `extractfile` would copy twice more.
        yield info, tar.fileobj.read
        vars(tar)["members"].clear()  # tarfile keeps a kilobyte for each member


def _zip_member(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tarfile.TarInfo, Read]:
    member, read = tarfile.TarInfo(info.filename), zipped.open(info).read
    member.size, member.mode, member.mtime = info.file_size, info.external_attr >> 16, int(time.time())
    member.type = tarfile.DIRTYPE if info.is_dir() else _ZIP_TYPES.get(stat.S_IFMT(member.mode), tarfile.CHRTYPE)
    if member.issym():
        member.linkname = read(_LONGEST_LINK).decode()
    return member, read
