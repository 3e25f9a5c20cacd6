"""Make sure that a copy of the data lies on this node's disk: one that is there already, or a new one."""

import errno
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from hpc.core.errors import TorchrelayError
from hpc.staging import space
from hpc.staging.archive import unpack
from hpc.staging.cancellable_wait import CancellableWait
from hpc.staging.copy import Copy, CopyProgress, CopyStats, Watch, checksums_by_batch, share
from hpc.staging.manifest import CopiedFile, Manifest, boot_id, is_intact
from hpc.staging.peers import ChunkStore, PeerServer
from hpc.staging.shared_listing import find_list
from hpc.staging.source import SourceListing, absolute
from hpc.staging.staged import NoRoomError, Staged
from hpc.staging.store import CacheEntry, CacheStore, StalledError, open_store
from hpc.staging.team import Address, CacheStatus, SingleNode, StagingGroup

# The leading node decides who reads what within seconds; without its word this node reads everything.
_PLAN_SECONDS = 60.0
# How long a node that has unpacked its archive keeps it for those that still copy it from here.
_KEEP_ARCHIVE_SECONDS = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Archives of images unpack to about their own size; what has less room than this is not even tried.
_UNPACKED_FACTOR = 1.1


class Stager:
    """One staging, and what lives on after it: the claim on the copy in use, and the server for the other nodes."""

    def __init__(
        self,
        stage_dir: Path,
        *,
        team: StagingGroup | None = None,
        watch: Watch = lambda _: False,
        keep_seconds: float = float("inf"),
    ) -> None:
        """Prepare.

        Args:
            stage_dir: a directory on this node's disk.
            team: the other nodes of the job; by default there are none.
            watch: is told how far it is, several times a second, and says whether to stop.
            keep_seconds: copies that were not used for so long are deleted; with 0, this one too when it is closed.
        """
        self._stage_dir, self._keep_seconds = stage_dir, keep_seconds
        self._team, self._patience = team or SingleNode(), CancellableWait(watch)
        self._held = ExitStack()
        self._server: PeerServer | None = None
        self._store: CacheStore | None = None
        self._archive: Path | None = None
        self._entry: CacheEntry | None = None
        self._notes = list[str]()
        self._evicted = list[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The data are not read any more, and no other node needs them from here."""
        if self._entry is not None:
            self._entry.touch()
        self._held.close()
        if self._store is not None and not self._keep_seconds:
            self._store.expire(0)

    def stage(self, source: Path, *, read: bool = False) -> Staged:
        """Make sure that a whole copy is there.

        Args:
            source: a directory, or an archive to unpack.
            read: of a copy that is there, read everything and compare.

        Raises:
            StagingStopped: `watch` said so.
            TorchrelayError: the source cannot be read, or our directory is not safe to use.
        """
        began = time.monotonic()
        self._server = self._serve()
        listing = find_list(absolute(source), self._team, self._server, self._patience, self._notes)
        try:
            staged = self._find_or_copy(listing, read=read)
        except StalledError:
            staged = self._in_place(listing, "another job on this node makes the same copy, and stands still")
        except OSError as error:
            if error.errno not in _FULL:
                raise
            staged = self._in_place(listing, f"{self._stage_dir} was full before the copy was whole")
        return replace(
            staged,
            seconds=time.monotonic() - began,
            fallback="; ".join(self._notes) or None,
            evicted=tuple(self._evicted),
            in_memory=space.is_memory(self._stage_dir) and staged.in_place is None,
        )

    def _find_or_copy(self, listing: SourceListing, *, read: bool) -> Staged:
        self._store = store = open_store(self._stage_dir)
        entry = store.entry(listing.entry)
        self._use(entry)
        with entry.copying(self._wait_for_a_copy):
            self._entry = self._patience.entry = entry
            staged = self._stage(store, entry, listing, read=read)
        if listing.is_archive and not staged.reused:
            self._keep_for_others()
        return staged

    def _serve(self) -> PeerServer | None:
        if isinstance(self._team, SingleNode):
            return None
        server = PeerServer(self._team.nonce)
        self._held.callback(server.close)
        return server

    def _port(self) -> int:
        return self._server.port if self._server else 0

    # --- the copy that may be there ---

    def _use(self, entry: CacheEntry) -> None:
        """Keep it from being deleted from now on."""
        while (descriptor := entry.begin_use()) is None:
            self._patience.wait()
        self._held.callback(os.close, descriptor)

    def _wait_for_a_copy(self) -> None:
        """Another job on this node makes the same copy."""
        self._team.stand(CacheStatus.WAITS, 0)
        self._patience.wait()

    def _stage(self, store: CacheStore, entry: CacheEntry, listing: SourceListing, *, read: bool) -> Staged:
        manifest = entry.manifest()
        damaged = entry.damaged(manifest, self._patience.stopped, read=read) if manifest else None
        if manifest and not damaged:
            entry.touch()
            self._offer_whole(entry, listing, manifest.files)
            return Staged(path=entry.data, reused=True)
        store.sweep(entry.name)
        self._evicted += store.expire(self._keep_seconds)
        evicted, shortage = space.make_room(store, *_room_for(listing, damaged))
        self._evicted += evicted
        if shortage:
            return self._in_place(listing, shortage)
        partial = entry.new_partial()
        for name in listing.directories:
            (partial / "data" / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if listing.is_archive:
                tally, files = self._copy_and_unpack(entry, partial, listing, damaged)
            else:
                tally, files = self._copy(partial, listing, damaged)
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
        entry.touch()
        self._team.stand(CacheStatus.NOTHING, self._port() if self._is_shared(damaged) else 0)
        self._notes += [f"{why}: {count} parts" for why, count in tally.fallbacks.items()]
        return Staged(
            path=entry.data,
            bytes_from_source=tally.from_source,
            bytes_from_peers=tally.from_peers,
            repaired=len(damaged or ()),
        )

    def _is_shared(self, damaged: list[str] | None) -> bool:
        """Whether the other nodes get this node's copy from it; a copy that is only mended is not handed out."""
        return self._server is not None and damaged is None

    def _offer_whole(self, entry: CacheEntry, listing: SourceListing, files: tuple[CopiedFile, ...]) -> None:
        """Hand out a copy that is there; of an archive, what was unpacked is no help to those who have to unpack it."""
        if self._server is None or listing.is_archive:
            self._team.stand(CacheStatus.NOTHING, 0)
            return
        shelf = ChunkStore(listing, entry.data)
        self._held.callback(shelf.close)
        for number, checksums in checksums_by_batch(listing, files).items():
            shelf.put(number, checksums)
        self._server.shelves[listing.entry] = shelf
        self._team.stand(CacheStatus.NOTHING, self._server.port)

    def _in_place(self, listing: SourceListing, why: str) -> Staged:
        """Read from shared storage.

        Raises:
            NoRoomError: an archive cannot be read without unpacking.
        """
        if listing.is_archive:
            raise NoRoomError(why, listing.source)
        self._team.stand(CacheStatus.ABSENT, 0)
        return Staged(path=listing.source, in_place=why)

    # --- a new copy ---

    def _copy(
        self, partial: Path, listing: SourceListing, damaged: list[str] | None
    ) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Fill a directory with what is missing: everything, or the damaged files."""
        shelf = ChunkStore(listing, partial / "data")
        self._held.callback(shelf.close)
        if self._server and self._is_shared(damaged):
            self._server.shelves[listing.entry] = shelf
        self._team.stand(CacheStatus.ALL if damaged is None else CacheStatus.SOME, self._port())
        owners = self._owners()
        copy = Copy(
            listing,
            share(_wanted(listing, damaged), owners, (self._team.host, self._port()), self._team.nonce),
            partial / "data",
            shelf,
        )
        copy.run(self._patience.look)
        return copy.tally, copy.copied()

    def _copy_and_unpack(
        self, entry: CacheEntry, partial: Path, listing: SourceListing, damaged: list[str] | None
    ) -> tuple[CopyStats, tuple[CopiedFile, ...]]:
        """Fill a directory with what is in an archive. That is kept aside, for the nodes that get it from here."""
        aside = entry.new_partial()
        self._held.callback(shutil.rmtree, aside, ignore_errors=True)
        self._archive = aside
        tally, [copied] = self._copy(aside, listing, damaged)
        archive = aside / "data" / listing.source.name
        if not is_intact(archive, copied, self._patience.stopped):
            raise TorchrelayError(f"{archive} is not what was written: is the disk of this node failing?")
        began = time.monotonic()

        def progress(done: int) -> bool:
            return self._patience.look(
                CopyProgress(what="unpacking", bytes_done=done, seconds=time.monotonic() - began)
            )

        return tally, unpack(archive, partial / "data", space.room(partial), progress)

    def _owners(self) -> tuple[Address, ...]:
        deadline = time.monotonic() + _PLAN_SECONDS
        while time.monotonic() < deadline:
            plan = self._team.plan()
            if plan is not None and plan.owners is not None:
                return plan.owners
            self._patience.wait()
        self._notes.append(f"the leading node did not say who reads what within {_PLAN_SECONDS:.0f} s")
        return ()

    def _keep_for_others(self) -> None:
        """Delete the archive as soon as the others have copied it, too."""
        deadline = time.monotonic() + _KEEP_ARCHIVE_SECONDS
        while time.monotonic() < deadline and (plan := self._team.plan()) and not plan.done:
            self._patience.wait()
        if self._archive is not None:
            shutil.rmtree(self._archive, ignore_errors=True)


def _room_for(listing: SourceListing, damaged: list[str] | None) -> tuple[int, int]:
    """Bytes, and how many files, of what is to be copied."""
    if listing.is_archive:
        return int(listing.size * (1 + _UNPACKED_FACTOR)), 1
    missing = None if damaged is None else set(damaged)
    sizes = [file.size for file in listing.files if missing is None or file.name in missing]
    return sum(sizes), len(sizes)


def _wanted(listing: SourceListing, damaged: list[str] | None) -> list[int]:
    """The batches to copy."""
    if damaged is None or listing.is_archive:
        return list(range(len(listing.batches)))
    names = set(damaged)
    return [
        number
        for number, batch in enumerate(listing.batches)
        if any(listing.files[piece.file].name in names for piece in batch)
    ]


def stage(source: Path, stage_dir: Path) -> Staged:
    """Stage on this node alone."""
    with Stager(stage_dir) as stager:
        return stager.stage(source)
