"""Staging one data set on this node: find an intact copy, or make or repair one. Runs on compute nodes."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hpc.core.errors import BadNodeError, TorchrelayError
from hpc.core.files import DISK_FULL
from hpc.core.nodedir import NoLocksError
from hpc.staging.archive import unpack
from hpc.staging.coordination import Address, CacheStatus, StagingGroup
from hpc.staging.copy import Copy, CopyStats, checksums_by_batch, copied_files
from hpc.staging.copy_progress import CancellableWait, CopyProgress, NoProgressError, Watch
from hpc.staging.peers import ChunkStore, Peer, PeerError, PeerServer
from hpc.staging.source import SourceListing, SourceWalk, absolute, check_unchanged
from hpc.staging.store import (
    CacheEntry,
    CopiedFile,
    Manifest,
    StalledError,
    available_bytes,
    boot_id,
    is_intact,
    is_memory,
    open_store,
)  # fmt: skip

# The head node assigns the batches within seconds; without its plan this node reads everything.
_PLAN_SECONDS = 60.0
# How long a node keeps its archive after unpacking, for peers that still fetch it.
_KEEP_ARCHIVE_SECONDS = 60.0
# Archives of images unpack to about their own size; with less room than this, unpacking is not attempted.
_UNPACKED_FACTOR = 1.1


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Result of one staging."""

    path: Path
    """Where this node reads the data."""
    reused: bool = False
    in_place: str | None = None
    """Why the data are read from shared storage after all; None if they were staged."""
    seconds: float = 0.0
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    fallback: str | None = None
    """Why this node read from shared storage what a peer should have sent."""
    repaired: int = 0
    """Number of damaged files."""
    evicted: tuple[str, ...] = ()
    """Names of the copies that were deleted to make room."""
    in_memory: bool = False
    """Whether the copy is RAM-backed."""
    shared: str | None = None
    """Why the copy is on no disk of this node's own; None if it is."""


class NoRoomError(TorchrelayError):
    """There is no room to unpack an archive, and an archive cannot be read in place."""

    def __init__(self, reason: str, archive: Path) -> None:
        super().__init__(
            f"{reason}: unpack {archive} on shared storage and submit with that directory as --data, or use "
            "--stage-dir with a larger disk"
        )
        self.reason = reason


class Stager:
    """One staging. Until it is closed the copy cannot be deleted, and peers can fetch it."""

    def __init__(
        self,
        stage_dir: Path,
        *,
        group: StagingGroup | None = None,
        watch: Watch = lambda _: False,
        keep_seconds: float = float("inf"),
        timeout_seconds: float = float("inf"),
    ) -> None:
        """Prepare.

        Args:
            stage_dir: a directory on this node's disk.
            group: the nodes of the job; by default this one alone.
            watch: receives the progress several times a second, and returns whether to stop.
            keep_seconds: copies that were not used for this long are deleted; with 0, this one too when it is closed.
            timeout_seconds: how long reading the source may make no progress.
        """
        self._stage_dir, self._keep_seconds = stage_dir, keep_seconds
        self._group, self._wait = group or StagingGroup(), CancellableWait(watch, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._held = ExitStack()
        self._server: PeerServer | None = None
        self._archive: Path | None = None
        self._shared: str | None = None
        self._notes = list[str]()
        self._evicted = list[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def check(self) -> None:
        """Raise, once, what has unexpectedly gone wrong in serving the peers (`Server.check`)."""
        if self._server:
            self._server.check()

    def stage(self, source: Path, *, read_all: bool = False) -> Staged:
        """Find, make or repair a copy.

        Args:
            source: a directory, or an archive to unpack.
            read_all: read every byte of an existing copy and compare it with the checksums.

        Raises:
            StagingStopped: `watch` returned true.
            BadNodeError: this node reads nothing from the source: its mount hangs.
            TorchrelayError: the source cannot be read, or the cache directory is not safe to use.
        """
        began = time.monotonic()
        if self._group.secret:
            self._server = PeerServer(self._group.secret, self._group.ports)
            self._held.callback(self._server.close)
        try:
            staged = self._list_and_copy(absolute(source), read_all=read_all)
        except NoProgressError:
            raise BadNodeError(
                f"{os.uname().nodename} has got nothing of {source} for {self._timeout_seconds:.0f} s: that mount "
                f"or the disk of {self._stage_dir} hangs there; leave the node out with --exclude, or wait longer with "
                "--stage-timeout"
            ) from None
        # Again: the node that shares it may have begun at the same moment.
        shared = None if staged.in_place else self._shared or open_store(self._stage_dir).why_shared()
        return replace(
            staged,
            seconds=time.monotonic() - began,
            fallback="; ".join(self._notes) or None,
            evicted=tuple(self._evicted),
            in_memory=is_memory(self._stage_dir) and staged.in_place is None,
            shared=shared,
        )

    def _list_and_copy(self, source: Path, *, read_all: bool) -> Staged:
        listing = self._find_listing(source)
        try:
            return self._find_or_copy(listing, read_all=read_all)
        except (StalledError, NoLocksError) as error:
            return self._read_in_place(listing, str(error))
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return self._read_in_place(listing, f"the disk of {self._stage_dir} filled up during the copy")

    @property
    def _port(self) -> int:
        return self._server.port if self._server else 0

    # --- the listing, which one node makes for all ---

    def _find_listing(self, source: Path) -> SourceListing:
        """List the source on the head node; fetch its listing on the others."""
        if not self._group.is_head:
            try:
                return self._fetch_listing(source)
            except PeerError as error:
                self._notes.append(str(error))
        walk = SourceWalk(source)
        listing = self._wait.run_in_thread(walk.run, cancel=walk.cancelled, done=lambda: walk.found)
        if self._group.is_head:
            if self._server:
                self._server.listings[listing.version] = listing.pack()
            self._group.publish_listing(listing.version, self._port)
            return listing
        plan = self._group.plan()
        if plan and plan.version and plan.version != listing.version:
            raise TorchrelayError(
                f"{source} has changed since {self._group.head(0).node} listed it: submit again when nothing writes to "
                "it any more"
            )
        return listing

    def _fetch_listing(self, source: Path) -> SourceListing:
        # Listing a million files takes minutes; `watch` stops this wait if the head node dies.
        while (plan := self._group.plan()) is None:
            self._wait.wait()
        head = self._group.head(plan.listing_port)
        with Peer(head, self._group.secret, plan.version) as peer:
            listing = self._wait.run_in_thread(peer.listing)
        if listing.source != source or listing.version != plan.version:
            raise PeerError(f"{head.node} sent the listing of another data set")
        return listing

    # --- the copy ---

    def _find_or_copy(self, listing: SourceListing, *, read_all: bool) -> Staged:
        store = open_store(self._stage_dir)
        self._shared = store.why_shared()
        if not self._keep_seconds:
            self._held.callback(store.delete_unused, 0)
        entry = store.entry(listing.version)
        while (descriptor := entry.lock_for_use()) is None:
            self._wait.wait()
        self._held.callback(os.close, descriptor)

        def wait_for_other_job() -> None:
            self._group.report(CacheStatus.WAITING, 0)
            self._wait.wait()

        with entry.locked_for_copy(wait_for_other_job):
            self._held.callback(entry.mark_used)
            self._wait.heartbeat = entry.send_heartbeat
            manifest = entry.manifest()
            damaged = entry.find_damaged(manifest, self._wait.stopped, read_all=read_all) if manifest else None
            if manifest is None or damaged:
                staged = self._make_or_repair(entry, listing, manifest, damaged)
            else:
                entry.mark_used()
                self._serve_copy(entry, listing, manifest.files)
                staged = Staged(path=entry.data, reused=True)
        if self._archive is not None:
            # Delete the copy of an archive as soon as no peer fetches it any more.
            deadline = time.monotonic() + _KEEP_ARCHIVE_SECONDS
            while time.monotonic() < deadline and (plan := self._group.plan()) and not plan.done:
                self._wait.wait()
            shutil.rmtree(self._archive, ignore_errors=True)
        return staged

    def _serve_copy(self, entry: CacheEntry, listing: SourceListing, files: tuple[CopiedFile, ...]) -> None:
        """Serve an intact copy to peers.

        Not that of an archive: its peers need the archive, which this node no longer has.
        """
        if self._server is None or listing.is_archive:
            self._group.report(CacheStatus.COMPLETE, 0)
            return
        chunks = ChunkStore(listing, entry.data)
        self._held.callback(chunks.close)
        for number, checksums in checksums_by_batch(listing, files).items():
            chunks.put(number, checksums)
        self._server.chunk_stores[listing.version] = chunks
        self._group.report(CacheStatus.COMPLETE, self._server.port)

    def _read_in_place(self, listing: SourceListing, reason: str) -> Staged:
        """Read from shared storage. Raises NoRoomError if the source is an archive."""
        if listing.is_archive:
            raise NoRoomError(reason, listing.source)
        self._group.report(CacheStatus.UNAVAILABLE, 0)
        return Staged(path=listing.source, in_place=reason)

    def _make_or_repair(
        self, entry: CacheEntry, listing: SourceListing, manifest: Manifest | None, damaged: list[str] | None
    ) -> Staged:
        """Make a copy, or repair the damaged files of one (None: everything)."""

        def make_room() -> str | None:
            entry.store.remove_partials(entry.name)
            self._evicted += entry.store.delete_unused(self._keep_seconds)
            needed = _needed(listing, damaged, copies_archive=self._group.has_peers)
            evicted, shortage = entry.store.make_room(*needed)
            self._evicted += evicted
            return shortage

        # Deleting a million files takes minutes.
        shortage = self._wait.run_in_thread(make_room)
        if shortage:
            return self._read_in_place(listing, shortage)
        partial = entry.new_partial()
        for name in listing.directories:
            (partial / "data" / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if listing.is_archive and self._group.has_peers:
                stats, files = self._copy_and_unpack(entry, partial, listing, damaged)
            elif listing.is_archive:
                stats, files = self._unpack_source(partial, listing)
            else:
                stats, files = self._copy(partial, listing, damaged)
            merged = {file.name: file for file in (*(manifest.files if manifest and damaged else ()), *files)}
            new = Manifest(
                source=str(listing.source),
                boot=boot_id(),
                files=tuple(merged.values()),
                directories=listing.directories,
            )
            entry.commit(partial, new, damaged)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        entry.mark_used()
        # Of a repaired copy, peers get nothing: its intact files were not read again.
        self._group.report(CacheStatus.COMPLETE, self._port if damaged is None else 0)
        self._notes += [f"{reason}: {count} batches" for reason, count in stats.fallbacks.items()]
        return Staged(
            path=entry.data,
            bytes_from_source=stats.from_source,
            bytes_from_peers=stats.from_peers,
            repaired=len(damaged or ()),
        )

    def _copy(
        self, partial: Path, listing: SourceListing, damaged: list[str] | None
    ) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Copy everything, or the damaged files."""
        chunks = ChunkStore(listing, partial / "data")
        self._held.callback(chunks.close)
        if self._server and damaged is None:
            self._server.chunk_stores[listing.version] = chunks
        self._group.report(CacheStatus.MISSING if damaged is None else CacheStatus.DAMAGED, self._port)
        batches = list(range(len(listing.batches)))
        if damaged is not None and not listing.is_archive:
            names = set(damaged)
            files = {index for index, file in enumerate(listing.files) if file.name in names}
            batches = [batch for batch in batches if any(chunk.file in files for chunk in listing.batches[batch])]
        copy = Copy(listing, batches, partial / "data", chunks)
        copy.run(self._wait_for_owners(), (self._group.host, self._port), self._group.secret, self._wait.update)
        return copy.stats, copied_files(listing, copy.checksums)

    def _copy_and_unpack(
        self, entry: CacheEntry, partial: Path, listing: SourceListing, damaged: list[str] | None
    ) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Copy an archive to a directory of its own, from which peers fetch it, and unpack it."""
        self._archive = entry.new_partial()
        self._held.callback(shutil.rmtree, self._archive, ignore_errors=True)
        stats, [copied] = self._copy(self._archive, listing, damaged)
        archive = self._archive / "data" / listing.source.name
        if not is_intact(archive, copied, self._wait.stopped):
            raise TorchrelayError(f"{archive} differs from what was written to it: check the disk of this node")
        return stats, self._unpack(archive, partial / "data")

    def _unpack_source(self, partial: Path, listing: SourceListing) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Unpack an archive from shared storage: without peers, nothing needs a copy of the archive."""
        [file] = listing.files

        def check() -> None:
            check_unchanged(str(listing.source), listing.source.stat(), (file.size, file.modified_ns))

        return CopyStats(from_source=file.size), self._unpack(listing.source, partial / "data", check)

    def _unpack(self, archive: Path, target: Path, check: Callable[[], None] = lambda: None) -> tuple[CopiedFile, ...]:
        """Unpack, and `check` the archive afterwards."""
        began, cancel, bytes_done = time.monotonic(), threading.Event(), 0

        def update(count: int) -> bool:
            nonlocal bytes_done
            bytes_done = count
            return cancel.is_set()

        def work() -> tuple[CopiedFile, ...]:
            try:
                return unpack(archive, target, available_bytes(target), update)
            finally:
                check()  # a change explains the damage

        return self._wait.run_in_thread(
            work,
            lambda: CopyProgress(activity="unpacking", bytes_done=bytes_done, seconds=time.monotonic() - began),
            cancel,
        )

    def _wait_for_owners(self) -> tuple[Address, ...]:
        """The owners of the batches; none if the head node does not name them in time."""
        deadline = time.monotonic() + _PLAN_SECONDS
        while time.monotonic() < deadline:
            plan = self._group.plan()
            if plan is not None and plan.owners is not None:
                return plan.owners
            self._wait.wait()
        self._notes.append(f"the head node did not assign the batches within {_PLAN_SECONDS:.0f} s")
        return ()


def _needed(listing: SourceListing, damaged: list[str] | None, *, copies_archive: bool) -> tuple[int, int]:
    """Bytes and number of the files to copy."""
    if listing.is_archive:
        return int(listing.size * (_UNPACKED_FACTOR + copies_archive)), 1
    names = None if damaged is None else set(damaged)
    sizes = [file.size for file in listing.files if names is None or file.name in names]
    return sum(sizes), len(sizes)
