"""Unpacks tar and zip archives that may be damaged or hostile. Runs on compute nodes.

These rules hold for all archives:

- names stay below the target; only files, directories and links; no name twice;
- symlinks are made last, so that no file is ever written through one, and none may lead outside;
- the archive must not end early, and its content must fit the disk, with the overhead of each entry.
"""

import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from hpc.base.errors import TorchrelayError, UserError
from hpc.sources.archive import Read, damage_reported, members_of
from hpc.sources.source_files import inside_name
from jobs.staging.copy_progress import stop_if
from jobs.staging.store import CopiedFile, bytes_on_disk, checksum, write_all

_CHUNK_BYTES = 4 * 2**20
# Programs that list or remove a tree recurse once per level.
_DEEPEST = 100
# Some file systems do not store later times.
_LATEST_TIME = 2**33


def unpack(archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> tuple[CopiedFile, ...]:
    """Unpack an archive into an empty directory. Returns the entries of its files for the manifest.

    The files may take `available` bytes on the disk. `update` receives the number of bytes unpacked so far, and returns
    whether to stop.

    Raises:
        StagingStopped: `update` returned true.
        TorchrelayError: the archive is damaged, unreadable, does not fit, or contains what no data set needs.
        OSError: the disk is full.
    """
    with damage_reported(archive), members_of(archive) as members:
        return _Unpacker(archive, target, available, update).run(members)


class _Unpacker:
    """Checks the members and writes them, in one thread: several threads would only contend for the GIL."""

    def __init__(self, archive: Path, target: Path, available: int, update: Callable[[int], bool]) -> None:
        self._archive, self._target, self._available, self._update = archive, target, available, update
        self._bytes_reserved = self._bytes_done = 0
        self._directories = {PurePosixPath()}
        self._files = dict[str, CopiedFile]()

    def run(self, members: Iterator[tuple[tarfile.TarInfo, Read]]) -> tuple[CopiedFile, ...]:
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

    def _refusal(self, member: tarfile.TarInfo, reason: str) -> UserError:
        return UserError(f"{self._archive.name} is refused: {member.name!r} {reason}; nothing of it was kept")

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
        stop_if(self._update(self._bytes_done))
        if size < 0:
            raise self._refusal(member, f"has {size} bytes")
        self._bytes_reserved += bytes_on_disk(size, files=1)
        if self._bytes_reserved > self._available:
            larger = f"makes it larger than the available {self._available // 2**20} MB"
            # Not a UserError: another node may have more room.
            raise TorchrelayError(f"{self._refusal(member, larger)}: use --stage-dir with a larger disk")

    def _write(self, member: tarfile.TarInfo, name: str, read: Read) -> None:
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

    def _write_chunks(self, descriptor: int, member: tarfile.TarInfo, read: Read) -> Iterator[str]:
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
