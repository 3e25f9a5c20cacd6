"""Copies batches from the source and from peers, in threads. Runs on compute nodes.

One node, the owner, reads each batch from shared storage, and the others fetch it from the owner. If an owner does not
send a batch, the node reads it from the source.
"""

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jobs.staging.coordination import Address
from jobs.staging.copy_progress import CopyProgress, Watch, stop_if
from jobs.staging.peers import ChunkStore, Peer, PeerError
from jobs.staging.source import FileChunk, SourceListing, read_chunk
from jobs.staging.store import checksum, write_all

# Two readers keep one and a half cores busy. Further readers only contend, unless the storage has a high latency and
# answers several requests at a time.
_SOURCE_THREADS, _MAX_SOURCE_THREADS, _PEER_THREADS = 2, 8, 2
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 5.0


@dataclass
class CopyStats:
    """The copied bytes by origin."""

    from_source: int = 0
    from_peers: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Number of batches that were read from the source because a peer did not send them, by reason."""


class Copy:
    """Copies one data set to this node's disk, once."""

    def __init__(self, listing: SourceListing, target: Path, chunks: ChunkStore) -> None:
        self._listing, self._target, self._chunks = listing, target, chunks
        self.stats = CopyStats()
        self._to_read: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._read_seconds = self._write_seconds = 0.0
        """Seconds that all readers together have spent on reading and on writing."""
        self._at_storage = 0
        """Number of threads that read or write now."""
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._peers = dict[Address, Peer]()

    def run(self, owners: Sequence[Address], own: tuple[str, int], secret: str, watch: Watch) -> None:
        """Copy all files. Their directories must exist.

        Batch b belongs to owner b modulo the number of owners; if there are none, this node reads all. `own` is the
        name of this node, which need not be an owner, and the port of its server.

        Raises:
            StagingStopped: `watch` returned true.
            TorchrelayError: a file could not be read, or has changed.
            OSError: the copy could not be written.
        """
        batches = range(len(self._listing.batches))
        by_owner = {owner: list(batches[index :: len(owners)]) for index, owner in enumerate(owners)}
        this = next((owner for owner in owners if (owner.node, owner.port) == own), None)
        for number in by_owner.pop(this, []) if this else [] if owners else batches:
            self._to_read.put(number)
        readers = [self._start(self._read_batches, "stage-source") for _ in range(_SOURCE_THREADS)]
        # Each fetching thread asks some of the owners.
        groups = [dict(list(by_owner.items())[first::_PEER_THREADS]) for first in range(_PEER_THREADS)]
        fetchers = [self._start(self._fetch_batches, "stage-peer", group, secret) for group in groups]
        try:
            self._monitor(readers, fetchers, watch)
        except BaseException as error:
            self._cancel(error)
            raise
        finally:
            # Wait for the threads, which would write into a directory that is being removed. But a thread that hangs
            # in a read must not delay the agent until Slurm kills it.
            deadline = time.monotonic() + _JOIN_SECONDS
            for thread in (*readers, *fetchers):
                thread.join(max(0.0, deadline - time.monotonic()))
            self._close_peers()

    def _monitor(self, readers: list[threading.Thread], fetchers: list[threading.Thread], watch: Watch) -> None:
        def report() -> None:
            if len(readers) < _MAX_SOURCE_THREADS and self._read_seconds > 2 * self._write_seconds:
                readers.append(self._start(self._read_batches, "stage-source"))
            done, total = self.stats.from_source + self.stats.from_peers, self._listing.size
            stop_if(watch(CopyProgress(bytes_done=done, bytes_total=total, at_storage=self._at_storage > 0)))

        # Fetchers end first: the readers also read the batches that an owner does not send.
        for threads in (fetchers, readers):
            while alive := [thread for thread in threads if thread.is_alive()]:
                report()
                # Join a live thread: joining a thread that has ended would return at once and make this loop spin.
                alive[0].join(_POLL_SECONDS)
            self._to_read.put(None)
        if self._error is not None:
            raise self._error
        report()

    def _start(self, work: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - `_monitor` raises it again
                self._cancel(error)

        thread = threading.Thread(target=guarded, daemon=True, name=name)
        thread.start()
        return thread

    def _cancel(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._cancelled.set()
        self._chunks.fail(f"it gave up ({str(error) or type(error).__name__})")
        self._close_peers()
        self._to_read.put(None)

    def _close_peers(self) -> None:
        for peer in tuple(self._peers.values()):
            peer.close()

    def _read_batches(self) -> None:
        """Read batches from the source until the queue gives None. Put None back to end the other readers, too."""
        # New memory for each chunk would cost as much as copying.
        buffer = memoryview(bytearray(self._listing.batch_bytes))
        while (number := self._to_read.get()) is not None and not self._cancelled.is_set():
            checksums = []
            for chunk in self._listing.batches[number]:
                content, began = buffer[: chunk.length], time.monotonic()
                with self._using_storage():
                    read_chunk(self._listing, chunk, content, self._cancelled)
                read = time.monotonic()
                checksums.append(checksum(content))  # while the content is in the CPU's cache
                self._write(chunk, content)
                with self._lock:
                    self._read_seconds += read - began
                    self._write_seconds += time.monotonic() - read
                    self.stats.from_source += chunk.length
            self._chunks.put(number, tuple(checksums), read=True)
        self._to_read.put(None)

    def _fetch_batches(self, by_owner: dict[Address, list[int]], secret: str) -> None:
        """Fetch the batches of some owners, one from each in turn."""
        buffer = memoryview(bytearray(self._listing.batch_bytes))
        while waiting := {owner: numbers for owner, numbers in by_owner.items() if numbers}:
            for owner, numbers in waiting.items():
                if self._cancelled.is_set():
                    return
                try:
                    if owner not in self._peers:
                        self._peers[owner] = Peer(owner, secret, self._listing.version)
                    self._fetch(self._peers[owner], numbers[0], buffer)
                    numbers.pop(0)
                except PeerError as error:
                    # The batches that this peer should have sent are read from the source.
                    with self._lock:
                        self.stats.fallbacks[str(error)] += len(numbers)
                    for number in numbers:
                        self._to_read.put(number)
                    numbers.clear()

    def _fetch(self, peer: Peer, number: int, buffer: memoryview) -> None:
        checksums = peer.ask(number)
        for chunk, expected in zip(self._listing.batches[number], checksums, strict=True):
            self._write(chunk, peer.receive(buffer[: chunk.length], expected))
            with self._lock:
                self.stats.from_peers += chunk.length
        self._chunks.put(number, checksums)

    def _write(self, chunk: FileChunk, content: memoryview) -> None:
        file = self._listing.files[chunk.file]
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._using_storage():
            descriptor = os.open(f"{self._target}/{file.name}", flags, 0o700 if file.executable else 0o600)
            try:
                write_all(descriptor, content, chunk.offset)
            finally:
                os.close(descriptor)

    @contextmanager
    def _using_storage(self) -> Iterator[None]:
        with self._lock:
            self._at_storage += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_storage -= 1
