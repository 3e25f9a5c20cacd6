"""The copying itself: batches from the source and from other nodes, in threads. Runs on compute nodes.

Each batch is read from shared storage by one node, its owner; the others get it from there. What an owner does not
give is read from the source after all.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc.staging.chunks import checksum, read_piece, write_piece
from hpc.staging.manifest import CopiedFile
from hpc.staging.peers import ChunkStore, Peer, PeerError
from hpc.staging.source import FileChunk, SourceListing, stop_if
from hpc.staging.team import Address

# Threads that need not wait get in each other's way: two keep a core and a half busy. Shared storage that lets them
# wait answers several requests at a time.
_SOURCE_THREADS, _MOST_SOURCE_THREADS, _PEER_THREADS = 2, 8, 2
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class CopyProgress:
    """How far a copy is."""

    what: str = "copying"
    bytes_done: int
    bytes_total: int | None = None
    """None: nobody knows yet."""
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second, so far."""
        return self.bytes_done / self.seconds if self.seconds else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until it is whole at this rate; None if that cannot be said."""
        if not self.rate or self.bytes_total is None:
            return None
        return (self.bytes_total - self.bytes_done) / self.rate


Watch = Callable[[CopyProgress | None], bool]
"""Is told how far a copy is, several times a second (None: it waits for others), and says whether to stop."""


@dataclass(frozen=True, kw_only=True)
class FileParts:
    """Which batches a node reads itself, and whom it asks for the others."""

    own: tuple[int, ...]
    others: tuple[tuple[Address, tuple[int, ...]], ...] = ()
    nonce: str = ""


def share(batches: Sequence[int], owners: tuple[Address, ...], own: Address, nonce: str) -> FileParts:
    """Divide batches among their owners; without owners this node reads all of them.

    Args:
        batches: the numbers of those that are wanted.
        owners: batch b belongs to owner b modulo their number.
        own: this node, which may be none of them.
        nonce: what the others want to see.
    """
    if not owners:
        return FileParts(own=tuple(batches))
    of = {
        owner: tuple(batch for batch in batches if batch % len(owners) == place) for place, owner in enumerate(owners)
    }
    mine = of.pop(own, ())
    return FileParts(own=mine, others=tuple((owner, part) for owner, part in of.items() if part), nonce=nonce)


@dataclass
class CopyStats:
    """What came from where."""

    from_source: int = 0
    from_peers: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Why batches that others were to send were read from the source, and how many."""

    @property
    def bytes(self) -> int:
        """Together."""
        return self.from_source + self.from_peers


class Copy:
    """One copy under way."""

    def __init__(self, listing: SourceListing, parts: FileParts, target: Path, shelf: ChunkStore) -> None:
        self._listing, self._parts, self._target, self._shelf = listing, parts, target, shelf
        self.tally = CopyStats()
        self.checksums: dict[int, tuple[str, ...]] = {}
        """Of the pieces of each batch that is there."""
        self._mine: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._read_seconds = self._write_seconds = 0.0
        """Of all readers together."""
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._peers = set[Peer]()

    def run(self, watch: Watch) -> None:
        """Copy everything.

        Raises:
            StagingStopped: `watch` says so.
            TorchrelayError: a file could not be read, or has changed.
            OSError: the copy could not be written.
        """
        batches = [*self._parts.own, *(number for _, part in self._parts.others for number in part)]
        self._make_directories(batches)
        for number in self._parts.own:
            self._mine.put(number)
        readers = [self._start(self._read, "stage-source") for _ in range(_SOURCE_THREADS)]
        askers = [self._start(self._ask, "stage-peer", group) for group in self._groups()]
        try:
            self._look_on(readers, askers, watch, batches)
        except BaseException as error:
            self._cancel(error)
            raise
        finally:
            # A thread that went on would write into a directory that is being removed; but one that hangs in a read
            # from storage that does not answer must not hold up what is to be done before Slurm kills this process.
            deadline = time.monotonic() + _END_SECONDS
            for thread in (*readers, *askers):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _look_on(
        self, readers: list[threading.Thread], askers: list[threading.Thread], watch: Watch, batches: Sequence[int]
    ) -> None:
        """Tell how far it is until all threads are done."""
        began = time.monotonic()
        total = sum(piece.length for number in batches for piece in self._listing.batches[number])

        def tell() -> None:
            seconds = time.monotonic() - began
            if len(readers) < _MOST_SOURCE_THREADS and self._read_seconds > 2 * self._write_seconds:
                readers.append(self._start(self._read, "stage-source"))
            stop_if(watch(CopyProgress(bytes_done=self.tally.bytes, bytes_total=total, seconds=seconds)))

        # What an owner does not give is read here: until all have been asked, there may be more to read.
        for threads in (askers, readers):
            # Not the last one: it may be done before the others, and this would not wait at all.
            while alive := [thread for thread in threads if thread.is_alive()]:
                tell()
                alive[0].join(_POLL_SECONDS)
            self._end_readers()
        if self._error is not None:
            raise self._error
        tell()

    def _end_readers(self) -> None:
        self._mine.put(None)

    def _make_directories(self, batches: Sequence[int]) -> None:
        files = {piece.file for number in batches for piece in self._listing.batches[number]}
        for directory in {os.path.dirname(self._listing.files[file].name) for file in files}:  # noqa: PTH120
            (self._target / directory).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _groups(self) -> list[list[tuple[Address, tuple[int, ...]]]]:
        """The owners that one thread each asks."""
        others = self._parts.others
        threads = min(len(others), _PEER_THREADS)
        return [list(others[first::threads]) for first in range(threads)]

    def _start(self, work: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - it is raised again where the copy was asked for
                self._cancel(error)

        thread = threading.Thread(target=guarded, daemon=True, name=name)
        thread.start()
        return thread

    def _cancel(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._cancelled.set()
        self._shelf.fail(f"it gave up ({error or type(error).__name__})")
        for peer in tuple(self._peers):
            peer.close()
        self._end_readers()

    def _room(self) -> memoryview:
        """For one piece. Each thread has one for all of its pieces: new memory costs as much as the copying."""
        return memoryview(
            bytearray(max((piece.length for batch in self._listing.batches for piece in batch), default=0))
        )

    def _read(self) -> None:
        """Read batches from the source until there are none."""
        room = self._room()
        while (number := self._mine.get()) is not None and not self._cancelled.is_set():
            checksums = []
            for piece in self._listing.batches[number]:
                content, began = room[: piece.length], time.monotonic()
                read_piece(self._listing, piece, content, self._cancelled)
                read = time.monotonic()
                # While it is in the processor's cache.
                checksums.append(checksum(content))
                self._write(piece, content)
                with self._lock:
                    self._read_seconds += read - began
                    self._write_seconds += time.monotonic() - read
                    self.tally.from_source += piece.length
            self._keep(number, tuple(checksums), read=True)
        self._mine.put(None)  # for the next reader

    def _ask(self, group: list[tuple[Address, tuple[int, ...]]]) -> None:
        """Get the batches of some owners, in turn; what one does not give is read from the source."""
        waiting, room = {address: list(reversed(part)) for address, part in group}, self._room()
        peers = dict[Address, Peer]()
        while waiting and not self._cancelled.is_set():
            for address in tuple(waiting):
                try:
                    if address not in peers:
                        peers[address] = Peer(address, self._parts.nonce, self._listing.entry)
                        self._peers.add(peers[address])
                    self._get(peers[address], waiting[address][-1], room)
                    waiting[address].pop()
                except PeerError as error:
                    self._fall_back(waiting.pop(address), str(error))
                    continue
                if not waiting[address]:
                    del waiting[address]
        for peer in peers.values():
            peer.close()

    def _get(self, peer: Peer, number: int, room: memoryview) -> None:
        batch = self._listing.batches[number]
        checksums = peer.ask(number)
        for piece, expected in zip(batch, checksums, strict=True):
            content = peer.receive(room[: piece.length], expected)
            self._write(piece, content)
            with self._lock:
                self.tally.from_peers += piece.length
        self._keep(number, checksums)

    def _fall_back(self, numbers: list[int], reason: str) -> None:
        if self._cancelled.is_set():
            return
        with self._lock:
            self.tally.fallbacks[reason] = self.tally.fallbacks.get(reason, 0) + len(numbers)
        for number in reversed(numbers):
            self._mine.put(number)

    def _write(self, piece: FileChunk, content: memoryview) -> None:
        file = self._listing.files[piece.file]
        write_piece(f"{self._target}/{file.name}", piece.offset, content, 0o700 if file.executable else 0o600)

    def _keep(self, number: int, checksums: tuple[str, ...], *, read: bool = False) -> None:
        """A batch is there: hand it out from now on."""
        with self._lock:
            self.checksums[number] = checksums
        self._shelf.put(number, checksums, read=read)

    def copied(self) -> tuple[CopiedFile, ...]:
        """The files that are there."""
        return copied_files(self._listing, self.checksums)


def copied_files(listing: SourceListing, checksums: dict[int, tuple[str, ...]]) -> tuple[CopiedFile, ...]:
    """The files of a listing of which every piece was copied.

    Args:
        listing: the files.
        checksums: of the pieces of each batch that was copied.
    """
    by_file: list[list[str | None]] = [[] for _ in listing.files]
    for number, batch in enumerate(listing.batches):
        for place, piece in enumerate(batch):
            by_file[piece.file].append(checksums[number][place] if number in checksums else None)
    longest = max((piece.length for batch in listing.batches for piece in batch), default=0)
    return tuple(
        CopiedFile(file.name, file.size, longest, tuple(filter(None, sums)))
        for file, sums in zip(listing.files, by_file, strict=True)
        if None not in sums
    )


def checksums_by_batch(listing: SourceListing, files: Sequence[CopiedFile]) -> dict[int, tuple[str, ...]]:
    """The inverse of `copied_files`."""
    remaining = [iter(file.checksums) for file in files]
    return {
        number: tuple(next(remaining[piece.file]) for piece in batch) for number, batch in enumerate(listing.batches)
    }
