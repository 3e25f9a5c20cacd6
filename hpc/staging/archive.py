"""Unpacking archives from who knows where: nothing lands outside, nothing but files, directories and links inside.

Runs on compute nodes. One thread unpacks, others checksum and write. Links are made last, so that no file is ever
written through one.
"""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hpc.core.errors import TorchrelayError
from hpc.staging.archive_members import ArchiveMember, is_damage, opened
from hpc.staging.chunks import checksum, read_into, write_all, write_chunk
from hpc.staging.manifest import CopiedFile
from hpc.staging.progress import stop_if
from hpc.staging.source import inside_name
from hpc.staging.store import bytes_on_disk

_PIECE_BYTES = 16 * 2**20
# Small files are handed to the writers together: threads that take turns for each cost more than the writing.
_GROUP_BYTES, _GROUP_PARTS = 4 * 2**20, 500
_WRITERS = 2
# Groups in memory at a time, at most.
_WAITING = 4
_TWO_KINDS = "is a file and a directory at once"


def unpack(archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> tuple[CopiedFile, ...]:
    """Unpack a tar or zip archive into a directory, and return what is in it.

    Args:
        archive: one of `hpc.staging.source.ARCHIVES`, by its name.
        target: an empty directory that nobody else can write to.
        room: bytes that it may take; an archive that goes on is refused before the disk is full.
        progress: is told the bytes unpacked so far, and says whether to stop.

    Raises:
        StagingStopped: it said so.
        TorchrelayError: the archive is damaged, does not fit, or has what no data set needs.
        OSError: the disk is full.
    """
    unpacker = _Unpacker(archive, target, room, progress)
    with _tell_damage(archive, "is it whole? Make it again"), opened(archive) as members:
        return unpacker.run(members)


def check(archive: Path) -> None:
    """See that it can be opened and begins as it should.

    Raises:
        TorchrelayError: it does not.
        OSError: it cannot be read.
    """
    with _tell_damage(archive, "is it whole?"), opened(archive) as members:
        next(members, None)


@contextmanager
def _tell_damage(archive: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_damage(error):
            raise
        raise TorchrelayError(f"{archive.name} cannot be unpacked ({error}): {advice}") from error


class _Part(NamedTuple):
    """A file that is in the archive, or a piece of a large one."""

    member: ArchiveMember
    name: str
    offset: int
    size: int
    content: bytes | None
    """None: it stands in the archive as it is."""
    whole: bool


class _Unpacker:
    def __init__(self, archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> None:
        self._archive, self._target, self._room, self._progress = archive, target, room, progress
        self._needed = 0
        """Bytes on the disk."""
        self._bytes = 0
        """Those that the writers have got."""
        self._directories = {PurePosixPath()}
        self._checksums: dict[str, dict[int, str]] = {}
        self._sizes: dict[str, int] = {}
        self._modified: dict[str, int] = {}
        self._links = list[ArchiveMember]()
        self._group, self._group_bytes = list[_Part](), 0
        self._queue: queue.Queue[list[_Part] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None

    def run(self, members: Iterator[ArchiveMember]) -> tuple[CopiedFile, ...]:
        writers = [threading.Thread(target=self._write_groups, daemon=True, name="unpack") for _ in range(_WRITERS)]
        for writer in writers:
            writer.start()
        try:
            for member in members:
                self._take(member)
            self._hand_over()
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
            CopiedFile(name, self._sizes[name], _PIECE_BYTES, tuple(sums[place] for place in sorted(sums)))
            for name, sums in sorted(self._checksums.items())
        )

    def _refuse(self, member: ArchiveMember, why: str) -> TorchrelayError:
        return TorchrelayError(f"{self._archive.name} is refused: {member.name!r} {why}; nothing of it was kept")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, member: ArchiveMember) -> None:
        self._raise_error()
        if PurePosixPath(member.name) == PurePosixPath():
            return  # the top itself, `./`
        try:
            name = inside_name(member.name)
        except TorchrelayError:
            raise self._refuse(member, "leads out of the archive") from None
        path = PurePosixPath(name)
        self._make_directory(member, path if member.kind == "directory" else path.parent)
        if member.kind == "directory":
            return
        if member.kind in {"symlink", "hardlink"}:
            self._links.append(member)
        elif member.kind == "file":
            self._take_file(member, name)
        else:
            raise self._refuse(member, f"is a {member.kind}")

    def _make_directory(self, member: ArchiveMember, path: PurePosixPath) -> None:
        if path in self._directories:
            return
        try:
            (self._target / path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self._refuse(member, _TWO_KINDS) from None
        self._directories.add(path)

    def _take_file(self, member: ArchiveMember, name: str) -> None:
        self._grow(member, member.size)
        if name in self._checksums:
            raise self._refuse(member, "is in it twice")
        self._checksums[name], self._sizes[name] = {}, member.size
        if member.modified is not None:
            self._modified[name] = member.modified
        source = member.open() if member.offset is None else None
        whole = member.size <= _PIECE_BYTES
        if not whole:
            os.close(self._create(member, name))
        for offset in range(0, max(1, member.size), _PIECE_BYTES):
            size = min(_PIECE_BYTES, member.size - offset)
            content = source.read(size) if source else None
            if content is not None and len(content) != size:
                raise self._too_short(member, offset + len(content))
            self._group.append(_Part(member, name, offset, size, content, whole))
            self._group_bytes += size
            if self._group_bytes >= _GROUP_BYTES or len(self._group) >= _GROUP_PARTS:
                self._hand_over()

    def _hand_over(self) -> None:
        """Give what has come together to the writers."""
        self._raise_error()
        self._queue.put(self._group)
        self._bytes += self._group_bytes
        self._group, self._group_bytes = [], 0
        stop_if(self._progress(self._bytes))

    def _too_short(self, member: ArchiveMember, found: int) -> TorchrelayError:
        return self._refuse(member, f"has {found} bytes, where the archive says {member.size}")

    def _create(self, member: ArchiveMember, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(f"{self._target}/{name}", flags, 0o700 if member.executable else 0o600)
        except (FileExistsError, IsADirectoryError):
            raise self._refuse(member, _TWO_KINDS) from None

    def _write_groups(self) -> None:
        try:
            with self._archive.open("rb", buffering=0) as archive:
                room = memoryview(bytearray(_PIECE_BYTES))
                while (group := self._queue.get()) is not None:
                    for part in group if self._error is None else ():
                        self._write(part, archive.fileno(), room)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that unpacks
            self._error = error
            while self._queue.get() is not None:
                pass  # take them all, or who fills the queue would wait for ever

    def _write(self, part: _Part, archive: int, room: memoryview) -> None:
        if part.content is not None:
            content = memoryview(part.content)
        else:
            content, place = room[: part.size], (part.member.offset or 0) + part.offset
            if (found := read_into(archive, content, place)) < part.size:
                raise self._too_short(part.member, part.offset + found)
        if part.whole:
            descriptor = self._create(part.member, part.name)
            try:
                write_all(descriptor, content, part.offset)
            finally:
                os.close(descriptor)
        else:
            write_chunk(f"{self._target}/{part.name}", part.offset, content, 0o600)
        self._checksums[part.name][part.offset] = checksum(content)

    def _grow(self, member: ArchiveMember, size: int) -> None:
        if size < 0:
            raise self._refuse(member, f"has {size} bytes")
        self._needed += bytes_on_disk(size, files=1)
        if self._needed > self._room:
            raise self._refuse(member, f"makes it larger than the {self._room // 2**20} MB that there is room for")

    def _make_link(self, member: ArchiveMember) -> None:
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
        shutil.copy(self._target / original, path, follow_symlinks=False)
        self._checksums[name], self._sizes[name] = self._checksums[original], self._sizes[original]

    def _check_link(self, member: ArchiveMember) -> None:
        top = Path(os.path.realpath(self._target))
        if member.kind == "symlink" and not Path(os.path.realpath(self._target / member.name)).is_relative_to(top):
            raise self._refuse(member, f"is a link to {member.target!r}, out of the archive")
