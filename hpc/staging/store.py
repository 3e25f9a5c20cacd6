"""This node's copies of data sets: `<stage-dir>/torchrelay-<uid>/`, which nobody else can write. Runs on compute nodes.

    NAME-FINGERPRINT/data/       the copy
    NAME-FINGERPRINT/manifest    what it must be: sizes and checksums
    locks/NAME-FINGERPRINT.use   held, shared, by whoever reads the copy; alone by whoever deletes it
    locks/NAME-FINGERPRINT.copy  held by whoever makes or mends it
    .NAME-FINGERPRINT.ID.partial a copy under way; it gets its name when it is whole

All locks are the kernel's: those of a killed process are released.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.core.files import fsync_directory
from hpc.core.nodedir import open_lock, private_directory, try_lock
from hpc.staging.manifest import Manifest, boot_id, is_intact, read_manifest, read_size, size_of, write_manifest

# A process that copies says so every few seconds; one that has not for so long is suspended, or its storage hangs.
_STALLED_SECONDS = 60.0


class StalledError(Exception):
    """Another process makes the same copy, and does not go on."""


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One copy."""

    store: "CacheStore"
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
        """When it was last in use, in seconds since the epoch; 0: it has just been deleted."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def manifest(self) -> Manifest | None:
        """What it must be; None if it is not there, or nobody can say what it must be."""
        return read_manifest(self.path)

    def size(self) -> int:
        """Bytes in all its files; 0 if nobody can say."""
        return read_size(self.path)

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
        for name in manifest.directories:
            with contextlib.suppress(FileExistsError):
                (self.data / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not read and manifest.boot == boot_id():
            return [file.name for file in manifest.files if size_of(self.data / file.name) != file.size]
        wrong = [file.name for file in manifest.files if not is_intact(self.data / file.name, file, stopped)]
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
        """Only one process of this node makes or mends a copy at a time; the others call `wait` until it is done.

        Raises:
            StalledError: it does not go on: its job may be suspended, perhaps for this one.
        """
        descriptor = open_lock(self._copy_lock)
        try:
            while not try_lock(descriptor):
                wait()
                if time.time() - os.fstat(descriptor).st_mtime > _STALLED_SECONDS:
                    raise StalledError
            self.copies()
            yield
        finally:
            os.close(descriptor)

    @property
    def _copy_lock(self) -> Path:
        return self.store.locks / f"{self.name}.copy"

    def copies(self) -> None:
        """Whoever copies goes on."""
        os.utime(self._copy_lock)

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
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                self.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
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
        if damaged is None and not self.path.exists():
            write_manifest(partial, manifest)
            partial.rename(self.path)
            fsync_directory(self.store.root)
            return
        # A copy without a manifest may be read at the moment, like one that is mended.
        for name in [file.name for file in manifest.files] if damaged is None else damaged:
            (self.data / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (partial / "data" / name).replace(self.data / name)
        write_manifest(self.path, manifest)
        shutil.rmtree(partial)

    def touch(self) -> None:
        """It is used now. Its lock as well, or whoever sweeps /tmp takes that for old."""
        for path in (self.path, self.store.locks / f"{self.name}.use", self.store.locks / f"{self.name}.copy"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)


@dataclass(frozen=True, kw_only=True)
class CacheStore:
    """All copies of this user on this node below one directory."""

    root: Path

    @property
    def locks(self) -> Path:
        """Where the lock files are. They stay: who deleted one could lock another file than the next one does."""
        return self.root / "locks"

    def entry(self, name: str) -> CacheEntry:
        """A copy, which need not be there."""
        return CacheEntry(store=self, name=name)

    def entries(self) -> list[CacheEntry]:
        """The copies that are there, and those that are being packed, the least recently used first."""
        names = [path.name for path in self.root.iterdir() if path.name != "locks" and not path.name.startswith(".")]
        used = [(entry.used_at, entry) for entry in map(self.entry, names)]
        return [entry for at, entry in sorted(used, key=lambda pair: pair[0]) if at]

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


def open_store(stage_dir: Path) -> CacheStore:
    """This user's copies below a directory of this node.

    Raises:
        TorchrelayError: somebody else could have put something there.
    """
    store = CacheStore(root=private_directory(stage_dir))
    store.locks.mkdir(mode=0o700, exist_ok=True)
    return store
