"""Stages one data set on this node: finds an intact copy, or makes one. Runs on compute nodes.

The methods of `Stager` are in the order in which they run.
"""

import os
import shutil
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hpc.base.errors import BadNodeError, TorchrelayError
from hpc.base.files import DISK_FULL
from hpc.run.nodedir import NoLocksError
from jobs.staging.coordination import Address, CacheStatus, StagingGroup
from jobs.staging.copy import Copy, CopyStats
from jobs.staging.copy_progress import CancellableWait, CopyProgress, NoProgressError, Watch
from jobs.staging.peers import ChunkStore, Peer, PeerError, PeerServer
from jobs.staging.source import SourceListing, SourceWalk, check_unchanged
from jobs.staging.store import (
    CacheEntry,
    CopiedFile,
    Manifest,
    StalledError,
    available_bytes,
    boot_id,
    is_memory,
    open_store,
)  # fmt: skip
from jobs.staging.unpack_archive import unpack

# The first node assigns the batches within seconds. If it takes longer than this, this node reads everything.
_PLAN_SECONDS = 60.0
# A node keeps its archive for at most this long after unpacking, for peers that still fetch it.
_KEEP_ARCHIVE_SECONDS = 60.0
# Archives of images unpack to about their own size. Unpacking needs free space for this multiple of the size.
_UNPACKED_FACTOR = 1.1


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Result of one staging."""

    path: Path
    """The directory in which this node reads the data."""
    reused: bool = False
    in_place: str | None = None
    """Why this node reads the data from shared storage; None if they were staged."""
    seconds: float = 0.0
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    fallback: str | None = None
    """Why this node read data from shared storage that a peer should have sent; None if it did not."""
    in_memory: bool = False
    """Whether the copy is RAM-backed."""


class Stager:
    """Stages one data set. Until the stager is closed, the copy cannot be deleted, and peers can fetch it."""

    def __init__(
        self,
        stage_dir: Path,
        *,
        group: StagingGroup | None = None,
        watch: Watch = lambda _: False,
        keep_seconds: float = float("inf"),
        timeout_seconds: float = float("inf"),
    ) -> None:
        """Prepare a staging to a directory on this node's disk, by default without other nodes.

        Copies that were unused for `keep_seconds` are deleted; with 0, closing also deletes this copy.
        `timeout_seconds` is the longest time that reading the source may take without progress.
        """
        self._stage_dir, self._keep_seconds = stage_dir, keep_seconds
        self._group, self._wait = group or StagingGroup(), CancellableWait(watch, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._held = ExitStack()
        self._server: PeerServer | None = None
        self._archive: Path | None = None
        self._notes = list[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def check(self) -> None:
        """Raise, once, an unexpected error in serving the peers (`Server.check`)."""
        if self._server:
            self._server.check()

    def stage(self, source: Path) -> Staged:
        """Find or make a copy of a directory, or of the content of an archive.

        Raises:
            StagingStopped: `watch` returned true.
            BadNodeError: the source's mount or the disk of the copy hangs on this node.
            TorchrelayError: the source cannot be read, or the cache directory is not safe to use.
        """
        began = time.monotonic()
        if self._group.has_peers:
            self._server = PeerServer(self._group.secret, self._group.ports)
            self._held.callback(self._server.close)
        try:
            # A data set with two paths would be copied twice. Symlinks such as `datasets/current` are not resolved.
            staged = self._list_and_copy(Path(os.path.abspath(source)))  # noqa: PTH100 - pathlib leaves `..` in
        except NoProgressError:
            raise BadNodeError(
                f"{os.uname().nodename} has got nothing of {source} for {self._timeout_seconds:.0f} s: that mount "
                f"or the disk of {self._stage_dir} hangs there; leave the node out with --exclude, or wait longer with "
                "--stage-timeout"
            ) from None
        return replace(
            staged,
            seconds=time.monotonic() - began,
            fallback="; ".join(self._notes) or None,
            in_memory=not staged.in_place and is_memory(self._stage_dir),
        )

    @property
    def _port(self) -> int:
        return self._server.port if self._server else 0

    def _list_and_copy(self, source: Path) -> Staged:
        listing = self._find_listing(source)
        try:
            return self._find_or_copy(listing)
        except (StalledError, NoLocksError) as error:
            return self._read_in_place(listing, str(error))
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return self._read_in_place(listing, f"the disk of {self._stage_dir} filled up during the copy")

    def _read_in_place(self, listing: SourceListing, reason: str) -> Staged:
        """Return the source as the place of the data. Raises TorchrelayError if it is an archive."""
        if listing.is_archive:
            raise TorchrelayError(
                f"{reason}: use another --stage-dir with enough space, or unpack {listing.source} on shared storage "
                "and use the directory"
            )
        self._group.report(CacheStatus.UNAVAILABLE, 0)
        return Staged(path=listing.source, in_place=reason)

    # --- the listing, which one node makes for all ---

    def _find_listing(self, source: Path) -> SourceListing:
        """Return the listing: the first node lists the source, and the others fetch its listing."""
        if not self._group.is_first:
            try:
                return self._fetch_listing(source)
            except PeerError as error:
                self._notes.append(str(error))
        walk = SourceWalk(source)
        listing = self._wait.run_in_thread(walk.run, cancel=walk.cancelled, done=lambda: walk.found)
        if self._group.is_first:
            if self._server:
                self._server.listings[listing.version] = listing.pack()
            self._group.publish_listing(listing.version, self._port)
            return listing
        plan = self._group.plan()
        if plan and plan.version and plan.version != listing.version:
            raise TorchrelayError(
                f"{source} has changed since {self._group.first_node(0).node} listed it: try again when nothing writes "
                "to it any more"
            )
        return listing

    def _fetch_listing(self, source: Path) -> SourceListing:
        # Listing a million files takes minutes; `watch` stops this wait if the first node dies.
        while (plan := self._group.plan()) is None:
            self._wait.wait()
        first_node = self._group.first_node(plan.listing_port)
        with closing(Peer(first_node, self._group.secret, plan.version)) as peer:
            listing = self._wait.run_in_thread(peer.listing)
        if listing.source != source or listing.version != plan.version:
            raise PeerError(f"{first_node.node} sent the listing of another data set")
        return listing

    # --- the copy ---

    def _find_or_copy(self, listing: SourceListing) -> Staged:
        store = open_store(self._stage_dir)
        if not self._keep_seconds:
            self._held.callback(store.delete_unused, 0)
        entry = store.entry(listing.version)
        in_use = self._held.enter_context(ExitStack())
        with entry.locked(self._wait, in_use, self._wait_for_other_job) as manifest:
            if manifest:
                # Peers that need an archive cannot use its unpacked copy.
                if not listing.is_archive:
                    self._serve(ChunkStore(listing, entry.data, manifest.files))
                self._group.report(CacheStatus.COMPLETE, 0 if listing.is_archive else self._port)
                staged = Staged(path=entry.data, reused=True)
            else:
                in_use.close()
                # A damaged copy must not take the space of the new one, but stays if another job reads it.
                self._wait.run_in_thread(entry.delete)
                entry.lock_for_use(self._wait, in_use)
                staged = self._make(entry, listing)
            if staged.in_place is None:
                entry.mark_used()
                in_use.callback(entry.mark_used)
        self._keep_archive_for_peers()
        return staged

    def _wait_for_other_job(self) -> None:
        self._group.report(CacheStatus.WAITING, 0)
        self._wait.wait()

    def _serve(self, chunks: ChunkStore) -> None:
        self._held.callback(chunks.close)
        if self._server:
            self._server.chunk_stores[chunks.listing.version] = chunks

    def _make(self, entry: CacheEntry, listing: SourceListing) -> Staged:
        # Run it in a thread, because deleting a million files takes minutes.
        shortage = self._wait.run_in_thread(lambda: self._make_room(entry, listing))
        if shortage:
            return self._read_in_place(listing, shortage)
        partial = entry.new_partial()
        for name in listing.directories:
            (partial / "data" / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            stats, files = self._fill(entry, partial / "data", listing)
            manifest = Manifest(
                source=str(listing.source), boot=boot_id(), files=files, directories=listing.directories
            )
            entry.commit(partial, manifest)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._group.report(CacheStatus.COMPLETE, self._port)
        self._notes += [f"{reason}: {count} batches" for reason, count in stats.fallbacks.items()]
        return Staged(path=entry.data, bytes_from_source=stats.from_source, bytes_from_peers=stats.from_peers)

    def _make_room(self, entry: CacheEntry, listing: SourceListing) -> str | None:
        """Delete unneeded copies. Returns why the new copy does not fit even then; None if it fits."""
        entry.store.remove_partials(entry.name)
        entry.store.delete_unused(self._keep_seconds)
        size, files = listing.size, len(listing.files)
        if listing.is_archive:
            size = int(size * (_UNPACKED_FACTOR + self._group.has_peers))
        return entry.store.make_room(size, files)

    def _fill(
        self, entry: CacheEntry, target: Path, listing: SourceListing
    ) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Copy the data, or unpack them. An archive that peers fetch is first copied to a directory of its own."""
        if not listing.is_archive:
            return self._copy(target, listing)
        if not self._group.has_peers:
            return CopyStats(from_source=listing.size), self._unpack(listing.source, target, listing)
        self._archive = entry.new_partial()
        self._held.callback(shutil.rmtree, self._archive, ignore_errors=True)
        stats, _ = self._copy(self._archive / "data", listing)
        return stats, self._unpack(self._archive / "data" / listing.source.name, target, listing)

    def _copy(self, target: Path, listing: SourceListing) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        chunks = ChunkStore(listing, target)
        self._serve(chunks)
        self._group.report(CacheStatus.MISSING, self._port)
        copy = Copy(listing, target, chunks)
        copy.run(self._wait_for_owners(), (self._group.host, self._port), self._group.secret, self._wait.update)
        return copy.stats, chunks.copied_files()

    def _wait_for_owners(self) -> tuple[Address, ...]:
        """Return the owners of the batches; none if the first node does not name them in time."""
        deadline = time.monotonic() + _PLAN_SECONDS
        while time.monotonic() < deadline:
            plan = self._group.plan()
            if plan is not None and plan.owners is not None:
                return plan.owners
            self._wait.wait()
        self._notes.append(f"the first node did not assign the batches within {_PLAN_SECONDS:.0f} s")
        return ()

    def _unpack(self, archive: Path, target: Path, listing: SourceListing) -> tuple[CopiedFile, ...]:
        cancel, bytes_done = threading.Event(), 0

        def update(count: int) -> bool:
            nonlocal bytes_done
            bytes_done = count
            return cancel.is_set()

        def work() -> tuple[CopiedFile, ...]:
            try:
                return unpack(archive, target, available_bytes(target), update)
            finally:
                if archive == listing.source:  # a change of the source would explain the damage
                    [file] = listing.files
                    check_unchanged(str(archive), archive.stat(), (file.size, file.modified_ns))

        return self._wait.run_in_thread(work, lambda: CopyProgress(activity="unpacking", bytes_done=bytes_done), cancel)

    def _keep_archive_for_peers(self) -> None:
        """Wait, at most a minute, until no peer fetches the copy of an archive any more, and delete it."""
        if self._archive is not None:
            deadline = time.monotonic() + _KEEP_ARCHIVE_SECONDS
            while time.monotonic() < deadline and (plan := self._group.plan()) and not plan.done:
                self._wait.wait()
            shutil.rmtree(self._archive, ignore_errors=True)
