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
from pathlib import Path, PurePosixPath

from hpc.errors import TorchrelayError
from hpc.staging import space
from hpc.staging.manifest import Copied
from hpc.staging.members import CANNOT_UNPACK, Member, opened
from hpc.staging.pieces import checksum, write_piece
from hpc.staging.source import inside_name, stop_if

_PIECE_BYTES = 16 * 2**20
_WRITERS = 4
# Pieces in memory at a time, at most.
_WAITING = 8


def unpack(archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> tuple[Copied, ...]:
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
    try:
        with opened(archive) as members:
            return unpacker.run(members)
    except CANNOT_UNPACK as error:
        raise TorchrelayError(f"{archive.name} cannot be unpacked ({error}): is it whole? Make it again") from error


def check(archive: Path) -> None:
    """See that it can be opened and begins as it should.

    Raises:
        TorchrelayError: it does not.
        OSError: it cannot be read.
    """
    try:
        with opened(archive) as members:
            next(members, None)
    except CANNOT_UNPACK as error:
        raise TorchrelayError(f"{archive.name} cannot be unpacked ({error}): is it whole?") from error


class _Unpacker:
    def __init__(self, archive: Path, target: Path, room: int, progress: Callable[[int], bool]) -> None:
        self._archive, self._target, self._room, self._progress = archive, target, room, progress
        self._bytes = 0
        self._checksums: dict[str, dict[int, str]] = {}
        self._sizes: dict[str, int] = {}
        self._modified: dict[str, int] = {}
        self._links = list[Member]()
        self._queue: queue.Queue[tuple[str, int, bytes] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None

    def run(self, members: Iterator[Member]) -> tuple[Copied, ...]:
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

    def _refuse(self, member: Member, why: str) -> TorchrelayError:
        return TorchrelayError(f"{self._archive.name} is refused: {member.name!r} {why}; nothing of it was kept")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, member: Member) -> None:
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

    def _take_file(self, member: Member, name: str, path: Path) -> None:
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

    def _grow(self, member: Member, size: int) -> None:
        if size < 0:
            raise self._refuse(member, f"has {size} bytes")
        self._bytes += space.needed(size, files=1)
        if self._bytes > self._room:
            raise self._refuse(member, f"makes it larger than the {self._room // 2**20} MB that there is room for")

    def _write(self) -> None:
        while (piece := self._queue.get()) is not None:
            if self._error is not None:
                continue  # take them all, or who fills the queue would wait for ever
            name, offset, content = piece
            try:
                write_piece(f"{self._target}/{name}", offset, memoryview(content), 0o600)
                self._checksums[name][offset] = checksum(content)
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that unpacks
                self._error = error

    def _make_link(self, member: Member) -> None:
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

    def _check_link(self, member: Member) -> None:
        top = Path(os.path.realpath(self._target))
        if member.kind == "symlink" and not Path(os.path.realpath(self._target / member.name)).is_relative_to(top):
            raise self._refuse(member, f"is a link to {member.target!r}, out of the archive")
