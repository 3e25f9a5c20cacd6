"""Unpacks tar and zip archives that may be damaged or hostile. Runs on compute nodes; `check` on the login node.

Python's own safe extraction, tarfile's data filter, is missing from Debian 12's Python 3.11.2; it also accepts archives
that end early, and knows no zip archives. So tarfile and zipfile only read here, and these rules hold for both:

- names stay below the target; only files, directories and links; no name twice;
- symlinks are made last, so that no file is ever written through one, and none may lead outside;
- the archive must not end early, and its content must fit the disk, with the overhead of each entry.
"""

import bz2
import errno
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from hpc.base.errors import TorchrelayError, UserError
from jobs.compat import check_tar_headers
from jobs.staging.copy_progress import stop_if
from jobs.staging.source import inside_name, read_with_retries
from jobs.staging.store import CopiedFile, bytes_on_disk, checksum, write_all
from jobs.staging.zstd import ZstdError, ZstdFile

_CHUNK_BYTES, _BUFFER_BYTES = 4 * 2**20, 2**18
# tarfile reads names and other extended headers of any size into memory.
_LONGEST_HEADER_BYTES, _LONGEST_LINK = 2**20, 4096
_EXTENDED_HEADERS = frozenset({
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
})  # fmt: skip
# A tar archive of this size is read in seconds.
_QUICK_BYTES = 2**26
# Programs that list or remove a tree recurse once per level.
_DEEPEST = 100
# Some file systems do not store later times.
_LATEST_TIME = 2**33
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
_ZIP_FROM_WINDOWS = 0
_Read = Callable[[int], bytes]
"""Function that returns the next bytes of a member. Call it before taking the next member."""


def unpack(archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> tuple[CopiedFile, ...]:
    """Unpack an archive into a directory. Returns the entries of its files for the manifest.

    Args:
        archive: path with a name that ends with one of `jobs.staging.source.ARCHIVES`.
        target: an empty directory to which no other user can write.
        available: bytes that the unpacked files may take on the disk.
        update: receives the number of bytes unpacked so far, and returns whether to stop.

    Raises:
        StagingStopped: `update` returned true.
        TorchrelayError: the archive is damaged, unreadable, does not fit, or contains what no data set needs.
        OSError: the disk is full.
    """
    with _damage_reported(archive), _members(archive) as members:
        return _Unpacker(archive, target, available, update).run(members)


def check(archive: Path) -> None:
    """Open an archive and read its first header. Raises TorchrelayError if it is damaged, unreadable, or no archive."""
    with _damage_reported(archive), _members(archive) as members:
        next(members, None)


def quick_names(archive: Path) -> list[str] | None:
    """Return the names of the files and directories in an archive; None if that takes long, or if it holds links."""
    with _damage_reported(archive):
        if archive.suffix == ".zip":  # its names are all at its end, and `check` has read them
            with _RetryingFile(archive) as raw, zipfile.ZipFile(raw) as zipped:
                members = _zip_entries(zipped)
                is_linked = any(stat.S_ISLNK(member.external_attr >> 16) for member in members)
                return None if is_linked else [member.filename for member in members]
        if archive.stat().st_size > _QUICK_BYTES:
            return None
        names = []
        with _members(archive) as entries:
            for member, _ in entries:
                if member.issym():
                    return None
                names.append(f"{member.name}/" if member.isdir() else member.name)
        return names


@contextmanager
def _damage_reported(archive: Path) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE_ERRNO:
            raise
        raise TorchrelayError(
            f"{archive.name} cannot be unpacked ({error}): is it complete? Create it again"
        ) from error


class _TarInfo(tarfile.TarInfo):
    """A tar header. Reading it fails if it is too large, or if tarfile would take damage for the archive's end."""

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


def _check_header(header: tarfile.TarInfo) -> None:
    if header.type in _EXTENDED_HEADERS and not 0 <= header.size <= _LONGEST_HEADER_BYTES:
        raise tarfile.ReadError(f"a header of {header.size} bytes")


check_tar_headers(_TarInfo, _check_header)


class _RetryingFile(io.FileIO):
    """An archive file that retries reads after errors, because it may be on shared storage."""

    def read(self, size: int | None = -1) -> bytes:
        return read_with_retries(str(self.name), partial(super().read, size), threading.Event()) or b""


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, _Read]]]:
    """Yield the members of an archive. TarInfo describes the members of a zip archive, too."""
    with _RetryingFile(archive) as raw:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(raw) as zipped:
                yield (_zip_member(zipped, info) for info in _zip_entries(zipped))
            return
        head = raw.read(8)
        raw.seek(0)
        decompress = next((opener for magic, opener in _DECOMPRESSORS.items() if head.startswith(magic)), None)
        mode, stream = ("r|", decompress(raw)) if decompress else ("r:", raw)
        # typeshed allows only literal modes.
        with stream, tarfile.open(fileobj=stream, mode=mode, bufsize=_BUFFER_BYTES, tarinfo=_TarInfo) as tar:  # type: ignore[call-overload]
            yield _tar_members(tar)


def _tar_members(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, _Read]]:
    for info in tar:
        # After a header, the file is at the member's content, which `extractfile` would copy twice more.
        yield info, tar.fileobj.read
        vars(tar)["members"].clear()  # tarfile keeps a kilobyte for each member


def _zip_entries(zipped: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    entries = zipped.infolist()
    for entry in entries:
        # Older programs for Windows separate directories by backslashes. unzip has the same rule.
        if entry.create_system == _ZIP_FROM_WINDOWS and "/" not in entry.filename:
            entry.filename = entry.filename.replace("\\", "/")
    return entries


def _zip_member(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tarfile.TarInfo, _Read]:
    member, read = tarfile.TarInfo(info.filename), zipped.open(info).read
    member.size, member.mode, member.mtime = info.file_size, info.external_attr >> 16, int(time.time())
    member.type = tarfile.DIRTYPE if info.is_dir() else _ZIP_TYPES.get(stat.S_IFMT(member.mode), tarfile.CHRTYPE)
    if member.issym():
        member.linkname = read(_LONGEST_LINK).decode()
    return member, read


class _Unpacker:
    """Checks the members and writes them, in one thread: several threads would only contend for the GIL."""

    def __init__(self, archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> None:
        self._archive, self._target, self._available, self._update = archive, target, available, update
        self._bytes_reserved = self._bytes_done = 0
        self._directories = {PurePosixPath()}
        self._files = dict[str, CopiedFile]()

    def run(self, members: Iterator[tuple[tarfile.TarInfo, _Read]]) -> tuple[CopiedFile, ...]:
        links = list[tuple[tarfile.TarInfo, Path]]()
        for member, read in members:
            if member.name in {"", ".", "./"}:  # the top directory
                continue
            name = self._place(member)
            if member.issym():
                links.append((member, self._target / name))
            elif member.islnk():
                self._copy_linked(member, name)
            elif member.isreg() and not member.issparse():
                self._write(member, name, read)
            elif not member.isdir():
                kind = "sparse file" if member.issparse() else "named pipe" if member.isfifo() else "device"
                raise self._refusal(member, f"is a {kind}")
        self._make_symlinks(links)
        return tuple(self._files[name] for name in sorted(self._files))

    def _refusal(self, member: tarfile.TarInfo, reason: str, advice: str = "") -> UserError:
        kept = f"nothing of it was kept{advice}"
        return UserError(f"{self._archive.name} is refused: {member.name!r} {reason}; {kept}")

    def _place(self, member: tarfile.TarInfo) -> str:
        """Check a member's name, and make and count its directories. Returns its path below the target."""
        try:
            path = PurePosixPath(inside_name(member.name))
        except TorchrelayError:
            raise self._refusal(member, "leads out of the archive") from None
        if len(path.parts) > _DEEPEST:
            raise self._refusal(member, f"is more than {_DEEPEST} directories deep")
        for directory in reversed((path, *path.parents) if member.isdir() else path.parents):
            if directory not in self._directories:
                self._reserve(member, 0)
                try:
                    (self._target / directory).mkdir(mode=0o700)
                except FileExistsError:
                    raise self._refusal(member, "is a file and a directory at once") from None
                self._directories.add(directory)
        return str(path)

    def _reserve(self, member: tarfile.TarInfo, size: int) -> None:
        """Count an entry against the available bytes."""
        stop_if(self._update(self._bytes_done))
        if size < 0:
            raise self._refusal(member, f"has {size} bytes")
        self._bytes_reserved += bytes_on_disk(size, files=1)
        if self._bytes_reserved > self._available:
            larger = f"makes it larger than the available {self._available // 2**20} MB"
            refusal = self._refusal(member, larger, ": use --stage-dir with a larger disk")
            raise TorchrelayError(str(refusal))  # another node may have more room

    def _write(self, member: tarfile.TarInfo, name: str, read: _Read) -> None:
        self._reserve(member, member.size)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(f"{self._target}/{name}", flags, 0o700 if member.mode & stat.S_IXUSR else 0o600)
        except FileExistsError:
            raise self._refusal(member, "is in it twice") from None
        try:
            checksums = tuple(self._write_chunks(descriptor, member, read))
            if 0 <= member.mtime < _LATEST_TIME:
                # Keep whole seconds: byte code records the time of its source in seconds, and Python compares the two.
                os.utime(descriptor, (time.time(), int(member.mtime)))
        finally:
            os.close(descriptor)
        self._files[name] = CopiedFile(name, member.size, _CHUNK_BYTES, checksums)

    def _write_chunks(self, descriptor: int, member: tarfile.TarInfo, read: _Read) -> Iterator[str]:
        """Write the content of a file. Yields the checksum of each chunk."""
        for offset in range(0, max(1, member.size), _CHUNK_BYTES):  # also one chunk for an empty file
            size = min(_CHUNK_BYTES, member.size - offset)
            content = read(size) if size else b""
            if len(content) < size:
                found = offset + len(content)
                raise self._refusal(member, f"has {found} bytes, but the archive declares {member.size}")
            write_all(descriptor, memoryview(content), offset)
            self._bytes_done += size
            stop_if(self._update(self._bytes_done))
            yield checksum(content)

    def _copy_linked(self, link: tarfile.TarInfo, name: str) -> None:
        """Copy the file that a hard link names. It must be in this archive: no other path is followed."""
        original = self._files.get(str(PurePosixPath(link.linkname)))
        if original is None:
            raise self._refusal(link, f"is a link to {link.linkname!r}, which is not a file in it")
        if (self._target / name).exists():
            raise self._refusal(link, "is in it twice")
        self._reserve(link, original.size)
        shutil.copy(self._target / original.name, self._target / name)
        self._files[name] = original._replace(name=name)

    def _make_symlinks(self, links: list[tuple[tarfile.TarInfo, Path]]) -> None:
        for link, path in links:
            self._reserve(link, 0)
            try:
                path.symlink_to(link.linkname)
            except FileExistsError:
                raise self._refusal(link, "is in it twice") from None
        top = os.path.realpath(self._target)
        for link, path in links:  # check after all are made, because one may lead out through another
            if not Path(os.path.realpath(path)).is_relative_to(top):
                raise self._refusal(link, f"is a link to {link.linkname!r}, outside of the archive")
