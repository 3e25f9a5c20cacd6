"""This node's copies of data sets: `<stage-dir>/torchrelay-<uid>/`, which nobody else can write. Runs on compute nodes.

    NAME-FINGERPRINT/data/       the copy
    NAME-FINGERPRINT/manifest    what it must be: sizes and checksums
    locks/NAME-FINGERPRINT.use   held, shared, by whoever reads the copy; alone by whoever deletes it
    locks/NAME-FINGERPRINT.copy  held by whoever makes or mends it
    .NAME-FINGERPRINT.ID.partial a copy under way; it gets its name when it is whole

All locks are the kernel's: those of a killed process are released.
"""

import contextlib
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hpc.files import fsync_directory, write_atomic
from hpc.private import open_lock, private_directory, try_lock
from hpc.staging.pieces import new_checksum
from hpc.staging.source import stop_if

_CHUNK_BYTES = 4 * 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Copied(NamedTuple):
    """One file of a copy."""

    name: str
    size: int
    piece_bytes: int
    checksums: tuple[str, ...]
    """XXH3 (128 bits) of each piece of `piece_bytes`, the last one shorter."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a copy must be."""

    source: str
    boot: str
    """Of the machine when the copy was last known to be whole: a power cut may have lost what was not on the disk."""
    files: tuple[Copied, ...]

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)


def boot_id() -> str:
    """Names the time since the machine was started."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One copy."""

    store: "Store"
    name: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.store.root / self.name

    @property
    def data(self) -> Path:
        """What is read."""
        return self.path / "data"

    @property
    def used_at(self) -> float:
        """When it was last taken into use, in seconds since the epoch."""
        return self.path.stat().st_mtime

    def manifest(self) -> Manifest | None:
        """What it must be; None if it is not there, or nobody can say what it must be."""
        try:
            source, boot, files = json.loads(zlib.decompress((self.path / "manifest").read_bytes()))
            copied = (Copied(name, size, piece_bytes, tuple(sums)) for name, size, piece_bytes, sums in files)
            return Manifest(source=source, boot=boot, files=tuple(copied))
        except (OSError, ValueError, TypeError, zlib.error):
            return None

    def size(self) -> int:
        """Bytes in all its files."""
        manifest = self.manifest()
        return manifest.size if manifest else 0

    def damaged(self, manifest: Manifest, stopped: Callable[[], bool], *, read: bool = False) -> list[str]:
        """Names of files that are not what they must be.

        Sizes are enough for a copy that this machine made since it was started; else everything is read.

        Args:
            manifest: what they must be.
            stopped: is asked now and then.
            read: read everything in any case.

        Raises:
            StagingStopped: it said yes.
        """
        if not read and manifest.boot == boot_id():
            return [file.name for file in manifest.files if _size(self.data / file.name) != file.size]
        wrong = [file.name for file in manifest.files if not _is_intact(self.data / file.name, file, stopped)]
        if not wrong and manifest.boot != boot_id():
            write_manifest(self.path, replace(manifest, boot=boot_id()))
        return wrong

    def begin_use(self) -> int | None:
        """Keep it from being deleted for as long as the descriptor is open; None while somebody deletes it."""
        descriptor = open_lock(self.store.locks / f"{self.name}.use")
        if not try_lock(descriptor, shared=True):
            os.close(descriptor)
            return None
        return descriptor

    @contextmanager
    def copying(self, wait: Callable[[], None]) -> Iterator[None]:
        """Only one process of this node makes or mends a copy at a time; the others call `wait` until it is done."""
        descriptor = open_lock(self.store.locks / f"{self.name}.copy")
        try:
            while not try_lock(descriptor):
                wait()
            yield
        finally:
            os.close(descriptor)

    def in_use(self) -> bool:
        """Whether somebody reads it."""
        descriptor = open_lock(self.store.locks / f"{self.name}.use")
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def delete(self) -> bool:
        """Delete it, unless somebody reads it."""
        descriptor = open_lock(self.store.locks / f"{self.name}.use")
        try:
            if not try_lock(descriptor):
                return False
            doomed = self.store.root / f".{self.name}.{uuid.uuid4().hex}.partial"
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(doomed)
                shutil.rmtree(doomed)
            return True
        finally:
            os.close(descriptor)

    def new_partial(self) -> Path:
        """An empty directory for a copy under way."""
        partial = self.store.root / f".{self.name}.{uuid.uuid4().hex}.partial"
        partial.mkdir(mode=0o700)
        (partial / "data").mkdir(mode=0o700)
        return partial

    def commit(self, partial: Path, manifest: Manifest, damaged: list[str] | None) -> None:
        """Give a whole copy its name, or put its files in the place of those that are damaged.

        Readers of a damaged copy have each file as it was or as it must be.
        """
        if damaged is None:
            write_manifest(partial, manifest)
            if self.path.exists():  # without a manifest it is nothing
                shutil.rmtree(self.path)
            partial.rename(self.path)
            fsync_directory(self.store.root)
            return
        for name in damaged:
            (self.data / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (partial / "data" / name).replace(self.data / name)
        write_manifest(self.path, manifest)
        shutil.rmtree(partial)

    def touch(self) -> None:
        """It is used now."""
        os.utime(self.path)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it down, whole."""
    content = json.dumps([manifest.source, manifest.boot, manifest.files]).encode()
    write_atomic(directory / "manifest", zlib.compress(content, level=1), mode=0o600)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_intact(path: Path, file: Copied, stopped: Callable[[], bool]) -> bool:
    """Read a file from the disk, not from the kernel's memory of it, and compare."""
    if _size(path) != file.size:
        return False
    with path.open("rb", buffering=0) as content:
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for checksum in file.checksums:
            stop_if(stopped())
            if _digest(content.fileno(), file.piece_bytes) != checksum:
                return False
    return True


def _digest(descriptor: int, count: int) -> str:
    digest = new_checksum()
    while count and (chunk := os.read(descriptor, min(count, _CHUNK_BYTES))):
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


def copied_whole(directory: Path, name: str) -> Copied:
    """A file that is there, as it is, in one piece."""
    with (directory / name).open("rb", buffering=0) as content:
        size = os.fstat(content.fileno()).st_size
        return Copied(name, size, max(1, size), (_digest(content.fileno(), size),))


@dataclass(frozen=True, kw_only=True)
class Store:
    """All copies of this user on this node below one directory."""

    root: Path

    @property
    def locks(self) -> Path:
        """Where the lock files are. They stay: who deleted one could lock another file than the next one does."""
        return self.root / "locks"

    def entry(self, name: str) -> Entry:
        """A copy, which need not be there."""
        return Entry(store=self, name=name)

    def entries(self) -> list[Entry]:
        """The copies that are there, and those that are being packed, the least recently used first."""
        names = [path.name for path in self.root.iterdir() if path.name != "locks" and not path.name.startswith(".")]
        return sorted(map(self.entry, names), key=lambda entry: entry.used_at)

    def sweep(self, held: str) -> None:
        """Remove what killed processes left half done.

        Args:
            held: the copy whose lock the caller holds.
        """
        for partial in self.root.glob(".*.partial"):
            name = partial.name[1:].rsplit(".", 2)[0]
            descriptor = open_lock(self.locks / f"{name}.copy")
            try:
                if name == held or try_lock(descriptor):
                    shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(descriptor)

    def expire(self, keep_seconds: float) -> list[str]:
        """Delete the copies that were not used for so long. Returns their names."""
        old = [entry for entry in self.entries() if time.time() - entry.used_at > keep_seconds]
        return [entry.name for entry in old if entry.delete()]

    def make_room(self, missing: Callable[[], int]) -> list[str]:
        """Delete copies that nobody reads, the least recently used first, until nothing is missing any more."""
        deleted = []
        for entry in self.entries():
            if missing() <= 0:
                break
            if entry.delete():
                deleted.append(entry.name)
        return deleted


def open_store(stage_dir: Path) -> Store:
    """This user's copies below a directory of this node.

    Raises:
        TorchrelayError: somebody else could have put something there.
    """
    store = Store(root=private_directory(stage_dir))
    store.locks.mkdir(mode=0o700, exist_ok=True)
    return store
