"""What stands in tar and zip archives, without believing it. Runs on compute nodes and on the login node."""

import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Self

import zstandard

_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_BROKEN_HEADERS = (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]  # typeshed leaves them out
# A name, or what else stands before a member: longer ones are there to fill the memory.
_LONGEST_HEADER_BYTES, _LONGEST_LINK = 2**20, 4096
_BLOCK_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_LATEST = 2**33
_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, ValueError,
    NotImplementedError, OverflowError, RecursionError,
)  # fmt: skip


def is_damage(error: Exception) -> bool:
    """Whether this is what Python's readers make of an archive that is damaged, or none, and not a disk's error."""
    return isinstance(error, _DAMAGED) or (isinstance(error, OSError) and error.errno is None)


@dataclass(frozen=True, kw_only=True)
class ArchiveMember:
    """What an archive says of one thing in it."""

    name: str
    kind: str
    """`file`, `directory`, `symlink` or `hardlink`; anything else is refused."""
    size: int = 0
    executable: bool = False
    target: str = ""
    modified: int | None = None
    """Seconds since the epoch, if it says."""
    offset: int | None = None
    """Of a file: where in the archive its content stands, if it stands there as it is."""
    open: Callable[[], IO[bytes] | None] = lambda: None
    """Else its content, to be read before the next member."""


class _TarInfo(tarfile.TarInfo):
    """Refuses what tarfile bears: headers of any size, which it would read into memory, and an archive that breaks off.

    To tarfile a damaged or empty header is the end, as is the end of a file that has been cut between two members.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except _BROKEN_HEADERS as error:
            if tar.offset:
                raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error
            raise
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # as above
            # To its end, where compressed files have their checksums.
            while block := tar.fileobj.read(_BLOCK_BYTES):
                if block.count(0) < len(block):
                    raise tarfile.ReadError(f"it ends at byte {tar.offset}, and there is more after that") from None
            raise

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        special = self.type in {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX_TYPES}
        if special and not 0 <= self.size <= _LONGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]  # typeshed leaves it out
        return member


@contextmanager
def opened(archive: Path) -> Iterator[Iterator[ArchiveMember]]:
    """The members of an archive, as they come."""
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
    elif (plain := _open_plain(archive)) is not None:
        with plain:
            yield _tar_members(plain, plain=True)
    elif _begins_like_gzip(archive):
        # tarfile's own reader does not look at the checksum.
        with gzip.open(archive) as unzipped, tarfile.open(fileobj=unzipped, mode="r|", tarinfo=_TarInfo) as file:
            yield _tar_members(file)
    else:
        with tarfile.open(archive, "r|*", tarinfo=_TarInfo) as file:
            yield _tar_members(file)


def _begins_like_gzip(archive: Path) -> bool:
    with archive.open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def _open_plain(archive: Path) -> tarfile.TarFile | None:
    """A tar archive of which nothing but the headers need be read: it is not compressed, whatever its name."""
    try:
        return tarfile.open(archive, "r:", tarinfo=_TarInfo)
    except tarfile.ReadError:
        return None


def _tar_members(file: tarfile.TarFile, *, plain: bool = False) -> Iterator[ArchiveMember]:
    for info in file:
        yield ArchiveMember(
            name=info.name,
            kind=_tar_kind(info),
            size=info.size if info.isreg() else 0,
            executable=bool(info.mode & stat.S_IXUSR),
            target=info.linkname,
            modified=int(info.mtime) if 0 <= info.mtime < _LATEST else None,
            offset=info.offset_data if plain else None,
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


def _zip_member(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArchiveMember:
    mode = info.external_attr >> 16
    if info.flag_bits & 1:
        raise NotImplementedError(f"{info.filename!r} is encrypted")
    kinds: dict[int, str] = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = "directory" if info.is_dir() else kinds.get(stat.S_IFMT(mode), "device")
    if kind == "symlink" and info.file_size >= _LONGEST_LINK:
        raise NotImplementedError(f"{info.filename!r} is a link of {info.file_size} bytes")
    target = file.read(info).decode() if kind == "symlink" else ""
    return ArchiveMember(
        name=info.filename, kind=kind, size=info.file_size, executable=bool(mode & stat.S_IXUSR), target=target,
        open=partial(file.open, info),
    )  # fmt: skip
