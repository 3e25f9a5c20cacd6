"""Transfers between nodes: a server of this node's batches, and a client of another node's. Runs on compute nodes.

A request is a message `{"version", "batch"}`, with a batch's number or null for the listing. The answer is a message
with checksums, followed by the bytes; or a message `failed`; or `waiting` while the owner has not read the batch. Both
ends prove that they have the attempt's secret (hpc.base.transport). The receiver checks the bytes by the checksums.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc.base.transport import Connection, DecodeError, Limits, Server, connect
from jobs.staging.coordination import Address
from jobs.staging.source import SourceListing
from jobs.staging.store import CopiedFile, checksum

# An owner that has not read a batch yet answers `waiting` every 5 s. After 60 s in which the owner read nothing, the
# client gives up on it.
_WAITING_SECONDS, _STALLED_SECONDS = 5.0, 60.0
# Long, because a client asks several owners in turn and may come back late.
_SERVER_LIMITS = Limits(timeout_seconds=3600.0, max_message_bytes=2**12)
# An answer has a checksum for every chunk of a batch.
_CLIENT_LIMITS = Limits(timeout_seconds=20.0, max_message_bytes=2**26)
_LARGEST_LISTING_BYTES = 2**32
_LONGEST_QUOTE = 200
_PURPOSE = "staging"


class PeerError(Exception):
    """Another node did not send the requested data."""


class ChunkStore:
    """The batches of one data set that this node has, and sends to peers."""

    def __init__(self, listing: SourceListing, data: Path, files: Sequence[CopiedFile] = ()) -> None:
        """Serve the batches of `files`, which are the files of a complete copy, or those that `put` adds."""
        self.listing = listing
        # Keep the directory open, because it is renamed when the copy is complete.
        self._directory = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        checksums = [iter(file.checksums) for file in files]
        batches = enumerate(listing.batches if files else ())
        self._checksums = {number: tuple(next(checksums[chunk.file]) for chunk in batch) for number, batch in batches}
        self._changed = threading.Condition()
        self._failed: str | None = None
        self.batches_read = 0
        """Number of batches that this node has read from the source, which shows its progress to a waiting peer."""

    def put(self, number: int, checksums: tuple[str, ...], *, read: bool = False) -> None:
        """Add a batch. `read` is whether this node has read it from the source."""
        with self._changed:
            self.batches_read += read
            self._checksums[number] = checksums
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Tell peers that wait for a batch that no more batches will come."""
        with self._changed:
            self._failed = reason
            self._changed.notify_all()

    def answer(self, number: int) -> dict[str, Any]:
        """Wait up to 5 s for a batch, and return the answer to a peer that has asked for it."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._checksums or self._failed, _WAITING_SECONDS)
            if number in self._checksums:
                return {"checksums": self._checksums[number]}
            return {"failed": self._failed} if self._failed else {"waiting": self.batches_read}

    def copied_files(self) -> tuple[CopiedFile, ...]:
        """Return the files for the manifest, once all batches have come."""
        by_file: list[list[str]] = [[] for _ in self.listing.files]
        for number, batch in enumerate(self.listing.batches):
            for chunk, digest in zip(batch, self._checksums[number], strict=True):
                by_file[chunk.file].append(digest)
        return tuple(
            CopiedFile(file.name, file.size, self.listing.batch_bytes, tuple(checksums))
            for file, checksums in zip(self.listing.files, by_file, strict=True)
        )

    def send(self, number: int, connection: socket.socket) -> None:
        """Send the bytes of a batch that this node has."""
        for chunk in self.listing.batches[number]:
            descriptor = os.open(
                self.listing.files[chunk.file].name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory
            )
            try:
                sent = 0
                while sent < chunk.length:  # socket.sendfile makes a selector for each file
                    count = os.sendfile(connection.fileno(), descriptor, chunk.offset + sent, chunk.length - sent)
                    if not count:
                        raise OSError("the file has become shorter")
                    sent += count
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Stop serving."""
        self.fail("the node has left")
        descriptor, self._directory = self._directory, -1
        if descriptor >= 0:
            os.close(descriptor)


class PeerServer:
    """Serves this node's listings and batches to the other nodes of the job."""

    def __init__(self, secret: str, ports: Sequence[int] = ()) -> None:
        """Serve on one of `ports`; if `ports` is empty, the kernel chooses a port."""
        self.listings: dict[str, bytes] = {}
        self.chunk_stores: dict[str, ChunkStore] = {}
        """The batches to serve, by version of the data set. The keys of `listings` are versions, too."""
        self._server = Server(secret, _PURPOSE, self._serve, _SERVER_LIMITS, ports)
        self.port, self.close, self.check = self._server.port, self._server.close, self._server.check

    def _serve(self, connection: Connection) -> None:
        # A wrong request or a failure ends the connection, and the other node reads the batch itself.
        while True:
            match connection.receive():
                case {"version": str(version), "batch": None} if version in self.listings:
                    content = self.listings[version]
                    connection.send({"bytes": len(content), "checksum": checksum(content)})
                    connection.send_bytes(content)
                case {"version": str(version), "batch": int(number)}:
                    store = self.chunk_stores.get(version)
                    answer = store.answer(number) if store else {"failed": "it has no copy"}
                    connection.send(answer)
                    if store and "checksums" in answer:
                        store.send(number, connection.socket)
                case request:
                    raise _unexpected(request)


class Peer:
    """A connection to another node's server."""

    def __init__(self, address: Address, secret: str, version: str) -> None:
        """Connect, to ask for one version of a data set. Raises PeerError if no agent of the job answers there."""
        self._name, self._version = address.node, version
        try:
            self._connection = connect((address.host, address.port), secret, _PURPOSE, _CLIENT_LIMITS)
        except OSError as error:
            raise PeerError(f"{self._name} cannot be reached ({error})") from error
        self.close = self._connection.close
        """Ends the connection; a thread that waits for an answer gets an error."""

    def listing(self) -> SourceListing:
        """Return the listing of the source. Raises PeerError if it does not come."""
        try:
            match self._ask(None):
                case {"bytes": int(size), "checksum": str(expected)} if 0 <= size < _LARGEST_LISTING_BYTES:
                    content = self.receive(memoryview(bytearray(size)), expected)
                    return SourceListing.unpack(bytes(content))
                case answer:
                    raise _unexpected(answer)
        except (OSError, ValueError) as error:
            raise PeerError(f"{self._name} does not send the listing ({error!r})") from error

    def ask(self, number: int) -> tuple[str, ...]:
        """Wait until the other node has a batch, and return the checksums of its chunks. Then call `receive` for each.

        Raises PeerError if the batch does not come.
        """
        batches_read, deadline = -1, 0.0
        try:
            while True:
                match self._ask(number):
                    case {"checksums": [*checksums]}:
                        return tuple(map(str, checksums))
                    case {"waiting": int(read)}:
                        if read != batches_read:
                            batches_read, deadline = read, time.monotonic() + _STALLED_SECONDS
                        if time.monotonic() > deadline:
                            raise PeerError(f"{self._name} has read nothing for {_STALLED_SECONDS:.0f} s")
                    case answer:
                        raise _unexpected(answer)
        except OSError as error:
            raise PeerError(f"{self._name} does not send ({str(error) or type(error).__name__})") from error

    def receive(self, into: memoryview, expected: str) -> memoryview:
        """Receive the next chunk into a buffer of its length. Raises PeerError if its checksum is not `expected`."""
        try:
            self._connection.receive_bytes(into)
        except OSError as error:
            raise PeerError(f"{self._name} does not send ({error})") from error
        if checksum(into) != expected:
            raise PeerError(f"what {self._name} sent is not what it had read")
        return into

    def _ask(self, batch: int | None) -> dict[str, Any]:
        self._connection.send({"version": self._version, "batch": batch})
        answer = self._connection.receive()
        if "failed" in answer:
            raise PeerError(f"{self._name}: {answer['failed']}")
        return answer


def _unexpected(message: dict[str, Any]) -> DecodeError:
    return DecodeError(f"another node of the job sent {str(message)[:_LONGEST_QUOTE]}")
