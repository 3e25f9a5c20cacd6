"""Data from node to node: a server of this node's batches, and a client of another's. Runs on compute nodes.

A request is one JSON line, `{"salt", "entry", "want", "proof"}` with a batch's number or `list`. The answer is four
bytes with a length, so much JSON, `{"answer", "proof"}`, and the bytes after it. Who cannot prove that he knows the
job's nonce, which stands in the run directory, gets nothing, and is not believed. What comes is checked against the
checksums of what was read.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, Self

from hpc.core.files import json_line
from hpc.staging.chunks import checksum
from hpc.staging.coordination import Address
from hpc.staging.source import FileChunk, SourceListing

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 20
# The owner answers "later" this often while its storage lets it wait, and is given up when nothing comes for so long.
_LATER_SECONDS, _PATIENCE_SECONDS, _IDLE_SECONDS = 5.0, 60.0, 3600.0
# What a stranger may make this node remember; an answer has a checksum for every piece of a batch.
_LONGEST_REQUEST, _LONGEST_ANSWER = 2**12, 2**26
_LIST = "list"
_LENGTH, _TIMEVAL = struct.Struct("!I"), struct.Struct("@ll")
# What a node that is broken, or none of ours, may make of an answer.
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError)


class PeerError(Exception):
    """Another node did not send what it was asked for."""


class ChunkStore:
    """What this node has of one data set: batch after batch while it copies, everything afterwards."""

    def __init__(self, listing: SourceListing, data: Path) -> None:
        self.listing = listing
        # Survives that the directory gets another name.
        self._directory = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._checksums: dict[int, tuple[str, ...]] = {}
        self._changed = threading.Condition()
        self._failed: str | None = None
        self.read = 0
        """How many batches this node has read from the source: who waits for one of them waits for that to go on."""

    def put(self, number: int, checksums: tuple[str, ...], *, read: bool = False) -> None:
        """A batch is there; this node may have `read` it from the source."""
        with self._changed:
            self.read += read
            self._checksums[number] = checksums
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """What is not there will not come."""
        with self._changed:
            self._failed = reason
            self._changed.notify_all()

    def get(self, number: int) -> tuple[str, ...] | None:
        """The checksums of a batch's pieces, as soon as it is there; None if that takes longer.

        Raises:
            PeerError: it will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._checksums or self._failed, _LATER_SECONDS)
            if number in self._checksums:
                return self._checksums[number]
            if self._failed:
                raise PeerError(self._failed)
            return None

    def send(self, number: int, connection: socket.socket) -> None:
        """Send the bytes of a batch that is there."""
        for piece in self.listing.batches[number]:
            descriptor = os.open(
                self.listing.files[piece.file].name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directory
            )
            try:
                _send_file(connection, descriptor, piece)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Nothing is to be had here any more."""
        self.fail("it has left")
        descriptor, self._directory = self._directory, -1
        if descriptor >= 0:
            os.close(descriptor)


def _send_file(connection: socket.socket, descriptor: int, piece: FileChunk) -> None:
    # socket.sendfile makes a selector for each file.
    takes_more, sent = select.poll(), 0
    takes_more.register(connection, select.POLLOUT)
    while sent < piece.length:
        try:
            count = os.sendfile(connection.fileno(), descriptor, piece.offset + sent, piece.length - sent)
        except BlockingIOError:
            if not takes_more.poll(_IDLE_SECONDS * 1000):
                raise TimeoutError("the other node takes nothing any more") from None
            continue
        if not count:
            raise OSError("the file has become shorter")
        sent += count


class PeerServer:
    """Hands out what is on the shelves, in threads of its own."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.listings: dict[str, bytes] = {}
        self.shelves: dict[str, ChunkStore] = {}
        """Both by entry."""
        self._server = _TcpServer(("", 0), _Conversation)
        self._server.owner = self
        threading.Thread(target=self._server.serve_forever, daemon=True, name="peers").start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _TcpServer(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True
    owner: PeerServer


class _Conversation(StreamRequestHandler):
    # Who asks several owners in turn may come back late.
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True

    def handle(self) -> None:
        # Whatever is wrong with a request or a connection: the other node reads the batch itself.
        with contextlib.suppress(*_BROKEN):
            while line := self.rfile.readline(_LONGEST_REQUEST):
                self._answer(json.loads(line))

    def _answer(self, request: dict[str, Any]) -> None:
        assert isinstance(self.server, _TcpServer)  # noqa: S101 - for the type checker
        owner, want = self.server.owner, request["want"]
        asked = (str(request["salt"]), str(request["entry"]), str(want))
        if not hmac.compare_digest(str(request["proof"]), _proof(owner.nonce, "ask", *asked)):
            raise ValueError("proof")

        def say(**answer: object) -> None:
            text = json.dumps(answer)
            said = json.dumps({"answer": text, "proof": _proof(owner.nonce, "answer", *asked, text)}).encode()
            self.wfile.write(_LENGTH.pack(len(said)) + said)

        if want == _LIST:
            content = owner.listings[request["entry"]]
            say(bytes=len(content), checksum=checksum(content))
            self.wfile.write(content)
            return
        shelf = owner.shelves.get(request["entry"])
        try:
            checksums = shelf.get(int(want)) if shelf else ()
        except PeerError as error:
            say(failed=str(error))
            return
        if shelf is None:
            say(failed="it has no copy")
        elif checksums is None:
            say(later=shelf.read)
        else:
            say(checksums=checksums)
            shelf.send(int(want), self.connection)


def _proof(nonce: str, *words: str) -> str:
    """Shows that one knows the nonce, without saying it, to whoever may listen on another's former port."""
    return hmac.new(nonce.encode(), json.dumps(words).encode(), "sha256").hexdigest()


class Peer:
    """A connection to one other node's server."""

    def __init__(self, address: Address, nonce: str, entry: str) -> None:
        self._name, self._nonce, self._entry, self._salt = address[0], nonce, entry, secrets.token_hex(16)
        try:
            self._connection = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as error:
            raise PeerError(f"{self._name} cannot be reached ({error})") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own timeouts: with Python's, the many pieces of a large file would come one by one.
        self._connection.settimeout(None)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, direction, _TIMEVAL.pack(_ANSWER_SECONDS, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; who waits for an answer in another thread gets an error."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def listing(self) -> SourceListing:
        """The list of files.

        Raises:
            PeerError: it does not come.
        """
        try:
            answer = self._ask(_LIST)
            content = bytearray(answer["bytes"])
            return SourceListing.unpack(bytes(self.receive(memoryview(content), answer["checksum"])))
        except _BROKEN as error:
            raise PeerError(f"{self._name} does not send the list of files ({error!r})") from error

    def ask(self, number: int) -> tuple[str, ...]:
        """Ask for a batch; the checksums of its pieces, as soon as the other node has them. The pieces follow.

        Raises:
            PeerError: they do not come.
        """
        try:
            return tuple(self._patiently(number)["checksums"])
        except _BROKEN as error:
            raise PeerError(f"{self._name} does not send ({error or type(error).__name__})") from error

    def receive(self, into: memoryview, expected: str) -> memoryview:
        """The next piece of the batch.

        Raises:
            PeerError: it does not come, or is not what it must be.
        """
        try:
            self._fill(into)
        except _BROKEN as error:
            raise PeerError(f"{self._name} does not send ({error or type(error).__name__})") from error
        if checksum(into) != expected:
            raise PeerError(f"what {self._name} sent is not what it had read")
        return into

    def _patiently(self, number: int) -> dict[str, Any]:
        count, deadline = -1, 0.0
        while True:
            answer = self._ask(number)
            if "later" not in answer:
                return answer
            if answer["later"] != count:
                count, deadline = answer["later"], time.monotonic() + _PATIENCE_SECONDS
            if time.monotonic() > deadline:
                raise PeerError(f"{self._name} has read nothing for {_PATIENCE_SECONDS:.0f} s")

    def _ask(self, want: int | str) -> dict[str, Any]:
        asked = (self._salt, self._entry, str(want))
        proof = _proof(self._nonce, "ask", *asked)
        request = {"salt": self._salt, "entry": self._entry, "want": want, "proof": proof}
        self._connection.sendall(json_line(request).encode())
        length = bytearray(_LENGTH.size)
        self._fill(memoryview(length))
        text = bytearray(min(*_LENGTH.unpack(length), _LONGEST_ANSWER))
        self._fill(memoryview(text))
        said = json.loads(text)
        if not hmac.compare_digest(str(said["proof"]), _proof(self._nonce, "answer", *asked, said["answer"])):
            raise PeerError(f"who answers on {self._name} does not belong to the job")
        answer: dict[str, Any] = json.loads(said["answer"])
        if "failed" in answer:
            raise PeerError(f"{self._name}: {answer['failed']}")
        return answer

    def _fill(self, view: memoryview) -> None:
        have = 0
        while have < len(view):
            try:
                got = self._connection.recv_into(view[have:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise PeerError(f"{self._name} has sent nothing for {_ANSWER_SECONDS} s") from None
            if not got:
                raise PeerError(f"{self._name} has closed the connection")
            have += got
