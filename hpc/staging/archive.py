"""Unpacking tar and zip archives that may be damaged or hostile. Runs on compute nodes; `check` on the login node.

Python's own safe extraction, tarfile's data filter, is missing from Debian 12's Python 3.11.2; it also accepts archives
that end early, and knows no zip archives. So tarfile and zipfile only read here, and these rules hold for both:

- names stay below the target; only files, directories and links; no name twice;
- links are made last, so that no file is ever written through one, and none may lead outside;
- the archive must have its end, and what it unpacks to must fit the disk, the number of its entries included.
"""

import bz2
import gzip
import io
import itertools
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

import zstandard

from hpc.core.errors import TorchrelayError
from hpc.staging.copy_progress import stop_if
from hpc.staging.source import inside_name, read_with_retries
from hpc.staging.store import CopiedFile, bytes_on_disk, checksum, write_all

_CHUNK_BYTES, _BUFFER_BYTES = 4 * 2**20, 2**18
# tarfile reads names and other extended headers into memory, whatever their size.
_LONGEST_HEADER_BYTES, _LONGEST_LINK = 2**20, 4096
# What lists or removes a tree calls itself once per level.
_DEEPEST = 100
# File systems do not store later times.
_LATEST_TIME = 2**33
_EXTENDED_HEADERS = {
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
}  # fmt: skip
_BROKEN_HEADERS = (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]  # typeshed lacks them
# RuntimeError: encrypted, compressed in an unknown way, or nested too deep.
_DAMAGE_ERRORS = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, ValueError,
    RuntimeError, OverflowError,
)  # fmt: skip
_ZIP_TYPES = {
    0: tarfile.REGTYPE, stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE
}  # fmt: skip
_Read = Callable[[int], bytes]
"""Reads the next bytes of a member's content, until the next member is taken."""


def unpack(archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> tuple[CopiedFile, ...]:
    """Unpack an archive into a directory. Returns the manifest's entries of its files.

    Args:
        archive: its name ends with one of `hpc.staging.source.ARCHIVES`.
        target: an empty directory that no other user can write to.
        available: bytes that the unpacked files may take on the disk.
        update: receives the bytes unpacked so far; returns whether to stop.

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


@contextmanager
def _damage_reported(archive: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Decompressors raise an OSError without errno; one of the disk has an errno.
        if not isinstance(error, _DAMAGE_ERRORS) and not (isinstance(error, OSError) and error.errno is None):
            raise
        raise TorchrelayError(
            f"{archive.name} cannot be unpacked ({error}): is it complete? Create it again"
        ) from error


# --- reading ---


class _TarInfo(tarfile.TarInfo):
    """Raises where tarfile takes damage for the end of the archive, and for headers that would fill the memory."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except _BROKEN_HEADERS as error:
            if tar.offset:
                raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error
            raise
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # as above
            # Read on to the end of the file, where decompressors verify their checksums.
            while block := tar.fileobj.read(_BUFFER_BYTES):
                if block.count(0) < len(block):
                    raise tarfile.ReadError(f"it ends at byte {tar.offset}, but more data follow") from None
            raise

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED_HEADERS and not 0 <= self.size <= _LONGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]  # typeshed lacks it
        return member


class _RetryingFile(io.FileIO):
    """An archive, which may be on shared storage."""

    def read(self, size: int | None = -1) -> bytes:
        return read_with_retries(str(self.name), partial(super().read, size), threading.Event()) or b""


# By the first bytes of a file. tarfile would decompress gzip itself, but does not verify its checksum.
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}  # fmt: skip


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, _Read]]]:
    """The members of an archive, one by one, those of a zip archive as tar's."""
    with _RetryingFile(archive) as raw:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(raw) as zipped:
                yield (_zip_member(zipped, info) for info in zipped.infolist())
            return
        head = raw.read(8)
        raw.seek(0)
        decompress = next((opener for magic, opener in _DECOMPRESSORS.items() if head.startswith(magic)), None)
        mode, stream = ("r|", decompress(raw)) if decompress else ("r:", raw)
        # typeshed knows only literal modes.
        with stream, tarfile.open(fileobj=stream, mode=mode, bufsize=_BUFFER_BYTES, tarinfo=_TarInfo) as tar:  # type: ignore[call-overload]
            yield _tar_members(tar)


def _tar_members(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, _Read]]:
    for info in tar:
        # After a header the file's position is the content's; `extractfile` would copy the content twice more.
        yield info, tar.fileobj.read
        vars(tar)["members"].clear()  # tarfile keeps a kilobyte for each


def _zip_member(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tarfile.TarInfo, _Read]:
    member = tarfile.TarInfo(info.filename)
    member.size, member.mode, member.mtime = info.file_size, info.external_attr >> 16, int(time.time())
    member.type = tarfile.DIRTYPE if info.is_dir() else _ZIP_TYPES.get(stat.S_IFMT(member.mode), tarfile.CHRTYPE)
    if member.issym():
        if info.file_size >= _LONGEST_LINK:
            raise NotImplementedError(f"{info.filename!r} is a link of {info.file_size} bytes")
        member.linkname = zipped.read(info).decode()
    return member, zipped.open(info).read


# --- writing ---


class _Unpacker:
    """Checks the members and writes them. One thread: more of them only contend for the GIL."""

    def __init__(self, archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> None:
        self._archive, self._target, self._available, self._update = archive, target, available, update
        self._bytes_needed = self._bytes_done = self._unreported = 0
        self._directories = {PurePosixPath()}
        self._files = dict[str, CopiedFile]()
        self._links = list[tarfile.TarInfo]()

    def run(self, members: Iterator[tuple[tarfile.TarInfo, _Read]]) -> tuple[CopiedFile, ...]:
        for member, read in members:
            if member.name not in {"", ".", "./"}:  # the top directory
                self._take(member, read)
        # Hard links first: they are written as files, and no file is ever written through a symlink.
        for link in sorted(self._links, key=tarfile.TarInfo.issym):
            self._make_link(link)
        top = os.path.realpath(self._target)
        for link in self._links:
            if link.issym() and not Path(os.path.realpath(self._target / link.name)).is_relative_to(top):
                raise self._refusal(link, f"is a link to {link.linkname!r}, outside of the archive")
        return tuple(self._files[name] for name in sorted(self._files))

    def _refusal(self, member: tarfile.TarInfo, reason: str, advice: str = "") -> TorchrelayError:
        kept = f"nothing of it was kept{advice}"
        return TorchrelayError(f"{self._archive.name} is refused: {member.name!r} {reason}; {kept}")

    def _take(self, member: tarfile.TarInfo, read: _Read) -> None:
        try:
            name = inside_name(member.name)
        except TorchrelayError:
            raise self._refusal(member, "leads out of the archive") from None
        path = PurePosixPath(name)
        if len(path.parts) > _DEEPEST:
            raise self._refusal(member, f"is more than {_DEEPEST} directories deep")
        self._make_directories(member, path if member.isdir() else path.parent)
        if member.issym() or member.islnk():
            self._links.append(member)
        elif member.isreg() and not member.issparse():
            self._write(member, name, read)
        elif not member.isdir():
            kind = "sparse file" if member.issparse() else "named pipe" if member.isfifo() else "device"
            raise self._refusal(member, f"is a {kind}")

    def _make_directories(self, member: tarfile.TarInfo, innermost: PurePosixPath) -> None:
        """Make the directories of a member that are missing. Each counts: one name may need thousands of them."""
        upwards = itertools.chain([innermost], innermost.parents)
        missing = list(itertools.takewhile(lambda path: path not in self._directories, upwards))
        for directory in reversed(missing):
            self._reserve(member, 0)
            try:
                (self._target / directory).mkdir(mode=0o700)
            except FileExistsError:
                raise self._refusal(member, "is a file and a directory at once") from None
            self._directories.add(directory)

    def _advance(self, size: int) -> None:
        """Report the bytes written, now and then; entries without content advance as well."""
        self._bytes_done += size
        self._unreported += bytes_on_disk(size, files=1)
        if self._unreported >= _CHUNK_BYTES:
            self._unreported = 0
            stop_if(self._update(self._bytes_done))

    def _reserve(self, member: tarfile.TarInfo, size: int) -> None:
        """Count an entry against the available bytes."""
        self._advance(0)
        if size < 0:
            raise self._refusal(member, f"has {size} bytes")
        self._bytes_needed += bytes_on_disk(size, files=1)
        if self._bytes_needed > self._available:
            larger = f"makes it larger than the available {self._available // 2**20} MB"
            raise self._refusal(member, larger, ": use --stage-dir with a larger disk")

    def _write(self, member: tarfile.TarInfo, name: str, read: _Read) -> None:
        self._reserve(member, member.size)
        if name in self._files:
            raise self._refusal(member, "is in it twice")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(f"{self._target}/{name}", flags, 0o700 if member.mode & stat.S_IXUSR else 0o600)
        except FileExistsError:
            raise self._refusal(member, "is a file and a directory at once") from None
        checksums = list[str]()
        try:
            for offset in range(0, max(1, member.size), _CHUNK_BYTES):  # an empty file has one chunk, too
                size = min(_CHUNK_BYTES, member.size - offset)
                content = read(size) if size else b""
                if len(content) < size:
                    found = offset + len(content)
                    raise self._refusal(member, f"has {found} bytes, but the archive declares {member.size}")
                write_all(descriptor, memoryview(content), offset)
                checksums.append(checksum(content))
                self._advance(size)
            if 0 <= member.mtime < _LATEST_TIME:
                # Whole seconds: Python compares them with those that byte code records of its source.
                os.utime(descriptor, (time.time(), int(member.mtime)))
        finally:
            os.close(descriptor)
        self._files[name] = CopiedFile(name, member.size, _CHUNK_BYTES, tuple(checksums))

    def _make_link(self, link: tarfile.TarInfo) -> None:
        name = inside_name(link.name)
        path = self._target / name
        if os.path.lexists(path):
            raise self._refusal(link, "is in it twice")
        if link.issym():
            self._reserve(link, 0)
            path.symlink_to(link.linkname)
            return
        try:
            original = inside_name(link.linkname)
        except TorchrelayError:
            raise self._refusal(link, f"is a link to {link.linkname!r}, outside of the archive") from None
        # Only a file of this archive: the path to any other may lead through a link.
        if original not in self._files:
            raise self._refusal(link, f"is a link to {link.linkname!r}, which is not a file in it")
        self._reserve(link, self._files[original].size)
        shutil.copy(self._target / original, path, follow_symlinks=False)
        self._files[name] = self._files[original]._replace(name=name)
