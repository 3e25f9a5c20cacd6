"""This node's cache of data sets, `<stage-dir>/torchrelay-<uid>/`, writable by its owner only. Runs on compute nodes.

    NAME-FINGERPRINT/data/       the copy
    NAME-FINGERPRINT/manifest    its files with sizes and checksums
    locks/NAME-FINGERPRINT.use   shared by the readers of the copy, exclusive for its deletion
    locks/NAME-FINGERPRINT.copy  exclusive for making the copy
    .NAME-FINGERPRINT.ID.partial an unfinished copy; renamed when it is complete

All locks are the kernel's (flock), which releases the locks of a killed process.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import xxhash

from hpc.base.errors import TorchrelayError
from hpc.base.files import fsync_directory, remove_abandoned, write_atomic
from hpc.base.kernel import RAM_BACKED, file_system_type
from hpc.run.nodedir import open_lock, private_directory, try_lock
from jobs.staging.copy_progress import CancellableWait, stop_if
from jobs.staging.source import pack_records, unpack_records

# A copying process sends a heartbeat every few seconds. After this long without one it is suspended, or its storage
# hangs.
_STALLED_SECONDS = 60.0
# Part of the disk that a copy leaves free, for other users' files and for the job's own files in /tmp.
_RESERVED_DISK_SHARE = 0.05
# Part of the free memory that a copy in RAM may take: the copy counts as memory of the job, whose ranks need some, too.
_USABLE_MEMORY_SHARE = 0.5
# A file occupies whole blocks, and an inode.
_FILE_OVERHEAD_BYTES = 4096 + 512


class StalledError(TorchrelayError):
    """Another process is making the same copy and has stalled."""


# --- the manifest of a copy ---


class CopiedFile(NamedTuple):
    """One file of a copy."""

    name: str
    size: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    """XXH3 (128 bits) of each chunk of `chunk_bytes`; the last chunk is shorter."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files that a copy must have."""

    source: str
    boot: str
    """Boot id when the copy was last known to be intact: a power cut may lose data that were not yet on the disk."""
    files: tuple[CopiedFile, ...]
    directories: tuple[str, ...] = ()


def checksum(content: memoryview | bytes) -> str:
    """Return XXH3 with 128 bits, as hex: it detects errors of disks and networks, at the speed of memory.

    It does not detect forgery; but a process that can write to a copy can also write to its manifest.
    """
    return str(xxhash.xxh3_128_hexdigest(content))


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a copy."""
    content = pack_records((manifest.source, manifest.boot), manifest.directories, manifest.files)
    write_atomic(directory / "manifest", content, mode=0o600)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of the content at an offset."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


# --- the disk ---


def is_memory(directory: Path) -> bool:
    """Return whether a directory is RAM-backed: its files take memory, not disk."""
    return file_system_type(directory) in RAM_BACKED


def available_bytes(directory: Path) -> int:
    """Return the bytes that a new copy may take in a directory."""
    usage = shutil.disk_usage(directory)
    free = usage.free - int(usage.total * _RESERVED_DISK_SHARE)
    if is_memory(directory):
        from torchrelay.node_memory import available_memory_bytes  # noqa: PLC0415  # hpc submit starts without it

        free = min(free, int(available_memory_bytes() * _USABLE_MEMORY_SHARE))
    return max(0, free)


def bytes_on_disk(size: int, files: int) -> int:
    """Return the bytes that files of this total size take on a disk."""
    return size + files * _FILE_OVERHEAD_BYTES


# --- the copies ---


@contextmanager
def _locked_if_free(path: Path) -> Iterator[bool]:
    """Hold a lock during the block if no other process holds it. Yields whether this process holds it."""
    descriptor = open_lock(path)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One copy, which need not exist yet."""

    store: "CacheStore"
    name: str

    @property
    def path(self) -> Path:
        """The directory of the copy."""
        return self.store.root / self.name

    @property
    def data(self) -> Path:
        """The copied files."""
        return self.path / "data"

    @property
    def used_at(self) -> float:
        """Time of the copy's last use in seconds since the epoch; 0 if it has just been deleted."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def _use_lock(self) -> Path:
        return self.store.locks / f"{self.name}.use"

    @property
    def _copy_lock(self) -> Path:
        return self.store.locks / f"{self.name}.copy"

    def manifest(self) -> Manifest | None:
        """Return the copy's manifest; None if it is missing or unreadable."""
        try:
            (source, boot), directories, copied = unpack_records((self.path / "manifest").read_bytes())
            files = tuple(CopiedFile(name, size, chunk_bytes, tuple(sums)) for name, size, chunk_bytes, sums in copied)
            return Manifest(source=source, boot=boot, files=files, directories=directories)
        except (OSError, ValueError, TypeError):
            return None

    def find_damaged(self, manifest: Manifest, stopped: Callable[[], bool]) -> list[str]:
        """Return the names of files that differ from the manifest. Creates directories that are missing.

        Reads the files that were changed after the manifest was written and, after a reboot, all files. Calls `stopped`
        for every file and every chunk. Raises StagingStopped if `stopped` returned true.
        """
        for name in manifest.directories:
            with contextlib.suppress(FileExistsError):
                (self.data / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        written_ns = (self.path / "manifest").stat().st_mtime_ns if manifest.boot == boot_id() else -1
        suspects = [file for file in manifest.files if self._may_differ(file, written_ns, stopped)]
        damaged = [file.name for file in suspects if self._differs(file, stopped)]
        if suspects and not damaged:
            write_manifest(self.path, replace(manifest, boot=boot_id()))
        return damaged

    def _may_differ(self, file: CopiedFile, written_ns: int, stopped: Callable[[], bool]) -> bool:
        """Return whether a file may have changed since a time. Each write changes ctime, which no program can set."""
        stop_if(stopped())
        try:
            status = (self.data / file.name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return status.st_size != file.size or status.st_ctime_ns >= written_ns

    def _differs(self, file: CopiedFile, stopped: Callable[[], bool]) -> bool:
        """Return whether a file has other bytes, on the disk, not in the page cache."""
        try:
            with (self.data / file.name).open("rb", buffering=0) as content:
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for expected in file.checksums:
                    stop_if(stopped())
                    if checksum(content.read(file.chunk_bytes)) != expected:
                        return True
                return os.fstat(content.fileno()).st_size != file.size
        except OSError:
            return True  # the file is missing, or the disk has a read error

    def lock_for_use(self, waiting: CancellableWait, in_use: ExitStack) -> None:
        """Prevent the copy's deletion until `in_use` is closed. Waits while another process deletes it."""
        descriptor = open_lock(self._use_lock)
        in_use.callback(os.close, descriptor)
        while not try_lock(descriptor, shared=True):
            waiting.wait()

    @contextmanager
    def locked(
        self, waiting: CancellableWait, in_use: ExitStack, wait_for_maker: Callable[[], None]
    ) -> Iterator[Manifest | None]:
        """Hold both locks: against deletion until `in_use` is closed, against other makers of the copy in the block.

        Yields the manifest of an intact copy, or None if there is none. While another process makes the copy, calls
        `wait_for_maker`. Raises StalledError if that process sends no heartbeat: its job may be suspended.
        """
        descriptor = open_lock(self._copy_lock)
        try:
            heartbeat, seen_at = 0, 0.0
            while not try_lock(descriptor):
                # Compare heartbeats with each other, not with the time of day, which somebody may set.
                if (newest := os.fstat(descriptor).st_mtime_ns) != heartbeat:
                    heartbeat, seen_at = newest, time.monotonic()
                if time.monotonic() - seen_at > _STALLED_SECONDS:
                    raise StalledError("another job on this node makes the same copy and has stalled: is it suspended?")
                wait_for_maker()
            self.send_heartbeat()
            waiting.heartbeat = self.send_heartbeat
            self.lock_for_use(waiting, in_use)
            manifest = self.manifest()
            yield None if manifest is None or self.find_damaged(manifest, waiting.stopped) else manifest
        finally:
            os.close(descriptor)

    def send_heartbeat(self) -> None:
        """Show that this process, which holds the copy lock, is making progress."""
        os.utime(self._copy_lock)

    def in_use(self) -> bool:
        """Return whether a process reads the copy."""
        with _locked_if_free(self._use_lock) as locked:
            return not locked

    def delete(self) -> None:
        """Delete the copy unless a process reads it."""
        with _locked_if_free(self._use_lock) as locked:
            if not locked:
                return
            doomed = self._new_name()
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                self.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _new_name(self) -> Path:
        return self.store.root / f".{self.name}.{uuid.uuid4().hex}.partial"

    def new_partial(self) -> Path:
        """Create a directory for an unfinished copy, with an empty `data` in it."""
        partial = self._new_name()
        partial.mkdir(mode=0o700)
        (partial / "data").mkdir(mode=0o700)
        return partial

    def commit(self, partial: Path, manifest: Manifest) -> None:
        """Give a complete copy its name.

        If other processes read a damaged copy of this name, its files are replaced one by one: the readers see each
        file either old or new.
        """
        if not self.path.exists():
            write_manifest(partial, manifest)
            partial.rename(self.path)
            fsync_directory(self.store.root)
            return
        for file in manifest.files:
            (self.data / file.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (partial / "data" / file.name).replace(self.data / file.name)
        write_manifest(self.path, manifest)  # after the renames, which change ctime
        shutil.rmtree(partial)

    def mark_used(self) -> None:
        """Record that the copy is used now, also in its lock files: a job that cleans up /tmp would delete old ones."""
        for path in (self.path, self._use_lock, self._copy_lock):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)


@dataclass(frozen=True, kw_only=True)
class CacheStore:
    """All copies of this user below one directory of this node."""

    root: Path

    @property
    def locks(self) -> Path:
        """Directory of the lock files. If one were deleted, two processes could lock two files of the same name."""
        return self.root / "locks"

    def entry(self, name: str) -> CacheEntry:
        """Return the entry of a copy, which need not exist."""
        return CacheEntry(store=self, name=name)

    def entries(self) -> list[CacheEntry]:
        """Return the existing copies, least recently used first."""
        names = [path.name for path in self.root.iterdir() if path.name != "locks" and not path.name.startswith(".")]
        used = [(entry.used_at, entry) for entry in map(self.entry, names)]
        return [entry for used_at, entry in sorted(used, key=lambda pair: pair[0]) if used_at]

    def remove_partials(self, locked: str) -> None:
        """Remove the unfinished copies of killed processes. The caller holds the lock of the copy named `locked`."""

        def is_abandoned(partial: Path) -> bool:
            name = partial.name[1:].rsplit(".", 2)[0]
            with _locked_if_free(self.locks / f"{name}.copy") as is_free:
                return name == locked or is_free

        remove_abandoned(self.root, ".*.partial", is_abandoned)

    def delete_unused(self, keep_seconds: float) -> None:
        """Delete the copies that were not used for `keep_seconds`."""
        for entry in self.entries():
            if time.time() - entry.used_at > keep_seconds:
                entry.delete()

    def make_room(self, size: int, files: int) -> str | None:
        """Delete copies, least recently used first, if that makes room for `files` files with `size` bytes in total.

        Returns why the new copy does not fit even then; None if it fits.
        """

        def missing_bytes() -> int:
            return bytes_on_disk(size, files) - available_bytes(self.root)

        unused = [entry.manifest() for entry in self.entries() if not entry.in_use()] if missing_bytes() > 0 else []
        if 0 < missing_bytes() <= sum(file.size for manifest in unused if manifest for file in manifest.files):
            for entry in self.entries():
                if missing_bytes() <= 0:
                    break
                entry.delete()
        inodes, needed, available = os.statvfs(self.root), bytes_on_disk(size, files), available_bytes(self.root)
        if inodes.f_files and files > inodes.f_favail:
            return f"{self.root} has {inodes.f_favail} free inodes, but the data set has {files} files"
        if needed <= available:
            return None
        kind = " (RAM-backed)" if is_memory(self.root) else ""
        megabytes = f"{available // 2**20} MB available, but the data need {needed // 2**20} MB"
        return f"{self.root}{kind} has {megabytes}"


def open_store(stage_dir: Path) -> CacheStore:
    """Return this user's cache on this node, or make it. Raises TorchrelayError if others may have written there."""
    store = CacheStore(root=private_directory(stage_dir))
    store.locks.mkdir(mode=0o700, exist_ok=True)
    return store
