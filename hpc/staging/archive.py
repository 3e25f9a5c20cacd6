"""Unpacking archives from who knows where: nothing lands outside, nothing but files, directories and links inside.

Runs on compute nodes. One thread unpacks, others checksum and write. Links are made last, so that no file is ever
written through one.
"""

import lzma
import os
import queue
import shutil
import stat
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import zstandard

from hpc.errors import TorchrelayError
from hpc.staging.manifest import Copied
from hpc.staging.pieces import checksum
from hpc.staging.source import inside_name, stop_if

_PIECE_BYTES = 16 * 2**20
_WRITERS = 4
# Pieces in memory at a time, at most.
_WAITING = 8
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
# A name, or what else stands before a member: longer ones are there to fill the memory.
_LONGEST_HEADER_BYTES = 2**20
# A file takes whole blocks, and an inode.
_FILE_BYTES = 4096 + 512
_CANNOT_UNPACK = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, ValueError,
    NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What an archive says of one thing in it."""

    name: str
    kind: str
    """`file`, `directory`, `symlink` or `hardlink`; anything else is refused."""
    size: int = 0
    executable: bool = False
    target: str = ""
    modified: int | None = None
    """Seconds since the epoch, if it says."""
    open: Callable[[], IO[bytes] | None] = lambda: None


def unpack(archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> tuple[Copied, ...]:
    """Unpack a tar or zip archive into a directory, and return what is in it.

    Args:
        archive: .tar, .tar.gz, .tgz, .tar.zst or .zip
        target: an empty directory that nobody else can write to.
        room: bytes that it may take; an archive that goes on is refused before the disk is full.
        progress: is told the bytes unpacked so far, and says whether to stop.

    Raises:
        StagingStopped: it said so.
        TorchrelayError: the archive is damaged, does not fit, or has what no data set needs.
        OSError: the disk is full.
    """
    unpacker = _Unpacker(archive, target, room, progress)
    try:
        with _opened(archive) as members:
            return unpacker.run(members)
    except _CANNOT_UNPACK as error:
        raise TorchrelayError(f"{archive.name} cannot be unpacked ({error}): is it whole? Make it again") from error


def check(archive: Path) -> None:
    """See that it can be opened and begins as it should.

    Raises:
        TorchrelayError: it does not.
        OSError: it cannot be read.
    """
    try:
        with _opened(archive) as members:
            next(members, None)
    except _CANNOT_UNPACK as error:
        raise TorchrelayError(f"{archive.name} cannot be unpacked ({error}): is it whole?") from error


class _TarInfo(tarfile.TarInfo):
    """Refuses headers that tarfile would read into memory whole, whatever their size."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        special = self.type in {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX_TYPES}
        if special and not 0 <= self.size <= _LONGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]  # typeshed leaves it out
        return member


class _Unpacker:
    def __init__(self, archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> None:
        self._archive, self._target, self._room, self._progress = archive, target, room, progress
        self._bytes = 0
        self._checksums: dict[str, dict[int, str]] = {}
        self._sizes: dict[str, int] = {}
        self._modified: dict[str, int] = {}
        self._links = list[_Member]()
        self._queue: queue.Queue[tuple[str, int, bytes] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None

    def run(self, members: Iterator[_Member]) -> tuple[Copied, ...]:
        writers = [threading.Thread(target=self._write, daemon=True, name="unpack") for _ in range(_WRITERS)]
        for writer in writers:
            writer.start()
        try:
            for member in members:
                self._take(member)
        finally:
            for _ in writers:
                self._queue.put(None)
            for writer in writers:
                writer.join()
        self._raise_error()
        # Python takes byte code for that of its source by the time of the source's last change.
        for name, modified in self._modified.items():
            os.utime(self._target / name, (time.time(), modified))
        # The hard ones first: they are written, and no file is ever written through a link.
        for link in sorted(self._links, key=lambda link: link.kind == "symlink"):
            self._make_link(link)
        for link in self._links:
            self._check_link(link)
        return tuple(
            Copied(name, self._sizes[name], _PIECE_BYTES, tuple(sums[place] for place in sorted(sums)))
            for name, sums in sorted(self._checksums.items())
        )

    def _refuse(self, member: _Member, why: str) -> TorchrelayError:
        return TorchrelayError(f"{self._archive.name} is refused: {member.name!r} {why}; nothing of it was kept")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, member: _Member) -> None:
        self._raise_error()
        if PurePosixPath(member.name) == PurePosixPath():
            return  # the top itself, `./`
        try:
            name = inside_name(member.name)
        except TorchrelayError:
            raise self._refuse(member, "leads out of the archive") from None
        path = self._target / name
        try:
            if member.kind == "directory":
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self._refuse(member, "is a file and a directory at once") from None
        if member.kind in {"symlink", "hardlink"}:
            self._links.append(member)
        elif member.kind == "file":
            self._take_file(member, name, path)
        else:
            raise self._refuse(member, f"is a {member.kind}")

    def _take_file(self, member: _Member, name: str, path: Path) -> None:
        self._grow(member, member.size)
        if name in self._checksums:
            raise self._refuse(member, "is in it twice")
        self._checksums[name], self._sizes[name] = {}, member.size
        if member.modified is not None:
            self._modified[name] = member.modified
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700 if member.executable else 0o600))
        except (FileExistsError, IsADirectoryError):
            raise self._refuse(member, "is a file and a directory at once") from None
        content, offset = member.open(), 0
        while True:
            piece = content.read(min(_PIECE_BYTES, member.size - offset)) if content else b""
            if not piece and offset:
                break
            self._queue.put((name, offset, piece))
            offset += len(piece)
            stop_if(self._progress(self._bytes - member.size + offset))
            if offset >= member.size:
                break
        if offset != member.size:
            raise self._refuse(member, f"has {offset} bytes, where the archive says {member.size}")

    def _grow(self, member: _Member, size: int) -> None:
        if size < 0:
            raise self._refuse(member, f"has {size} bytes")
        self._bytes += size + _FILE_BYTES
        if self._bytes > self._room:
            raise self._refuse(member, f"makes it larger than the {self._room // 2**20} MB that there is room for")

    def _write(self) -> None:
        while (piece := self._queue.get()) is not None:
            if self._error is not None:
                continue  # take them all, or who fills the queue would wait for ever
            name, offset, content = piece
            try:
                with (self._target / name).open("r+b", buffering=0) as file:
                    _write_all(file.fileno(), content, offset)
                self._checksums[name][offset] = checksum(content)
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that unpacks
                self._error = error

    def _make_link(self, member: _Member) -> None:
        name = inside_name(member.name)
        path = self._target / name
        if os.path.lexists(path):
            raise self._refuse(member, "is in it twice")
        if member.kind == "symlink":
            self._grow(member, 0)
            path.symlink_to(member.target)
            return
        # Only what was unpacked from this archive: the way to anything else may lead through a link.
        try:
            original = inside_name(member.target)
        except TorchrelayError:
            raise self._refuse(member, f"is a link to {member.target!r}, out of the archive") from None
        if original not in self._checksums:
            raise self._refuse(member, f"is a link to {member.target!r}, which is no file in it")
        self._grow(member, self._sizes[original])
        shutil.copyfile(self._target / original, path, follow_symlinks=False)
        self._checksums[name], self._sizes[name] = self._checksums[original], self._sizes[original]

    def _check_link(self, member: _Member) -> None:
        top = Path(os.path.realpath(self._target))
        if member.kind == "symlink" and not Path(os.path.realpath(self._target / member.name)).is_relative_to(top):
            raise self._refuse(member, f"is a link to {member.target!r}, out of the archive")


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[_Member]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            yield (_zip_member(zipped, info) for info in zipped.infolist())
    elif archive.suffix == ".zst":
        with (
            archive.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as data,
            tarfile.open(fileobj=data, mode="r|", tarinfo=_TarInfo) as file,
        ):
            yield _tar_members(file)
    else:
        with tarfile.open(archive, "r|*", tarinfo=_TarInfo) as file:
            yield _tar_members(file)


def _tar_members(file: tarfile.TarFile) -> Iterator[_Member]:
    for info in file:
        yield _Member(
            name=info.name,
            kind=_tar_kind(info),
            size=info.size if info.isreg() else 0,
            executable=bool(info.mode & stat.S_IXUSR),
            target=info.linkname,
            modified=int(info.mtime),
            open=partial(file.extractfile, info),
        )
        vars(file)["members"].clear()  # it would keep all of them, a kilobyte each


def _tar_kind(info: tarfile.TarInfo) -> str:
    kinds = (
        (info.issparse(), "sparse file"),
        (info.isreg(), "file"),
        (info.isdir(), "directory"),
        (info.issym(), "symlink"),
        (info.islnk(), "hardlink"),
        (info.isfifo(), "named pipe"),
    )
    return next((kind for applies, kind in kinds if applies), "device")


def _zip_member(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if info.flag_bits & 1:
        raise NotImplementedError(f"{info.filename!r} is encrypted")
    kinds: dict[int, str] = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = "directory" if info.is_dir() else kinds.get(stat.S_IFMT(mode), "device")
    target = file.read(info).decode() if kind == "symlink" and info.file_size < 4096 else ""
    return _Member(
        name=info.filename, kind=kind, size=info.file_size, executable=bool(mode & stat.S_IXUSR), target=target,
        open=partial(file.open, info),
    )  # fmt: skip
