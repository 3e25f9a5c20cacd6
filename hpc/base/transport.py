"""Authenticated connections between the nodes of a run (the agents' control channel, staging's peers), and free ports.

Runs on compute nodes; `training.verify_resume` also chooses a port.

The handshake proves to each end that the other end has the secret, which is never sent:

    client -> server   32 random bytes: the client's challenge
    server -> client   32 random bytes: the server's challenge, and the server's proof
    client -> server   the client's proof

A proof is an HMAC-SHA256 of purpose, role and both challenges, keyed with the secret: a replayed or reflected proof, or
a proof for another purpose, is invalid. Each direction then has its own key, which is derived in the same way.

A message is a JSON object, sent as four bytes of length, an HMAC of its number and text, and the text. Nothing is
encrypted: an eavesdropper can read messages, but not alter, repeat, or add any. Bulk data that follow a message have no
HMAC. The receiver checks them against checksums in an authenticated message, so they are as safe as these checksums.

A client must authenticate within `HANDSHAKE_SECONDS`. Until then it can send only 64 bytes, and none of them is parsed.
"""

import contextlib
import errno
import hmac
import json
import random
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HANDSHAKE_SECONDS = 5.0
_CHALLENGE_BYTES = _MAC_BYTES = 32
_LENGTH, _NUMBER, _TIMEVAL = struct.Struct("!I"), struct.Struct("!Q"), struct.Struct("@ll")
_BACKLOG = 1024  # all agents of a large job connect at once
_RETRY_SECONDS = 0.1
# Ports below this one belong to system services, and ports of the ephemeral range to outgoing connections.
LOWEST_PORT = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = 32_768
# `listen` shuffles the ports with the system's random numbers. For all twenty thousand ports that would be slow.
_TRIES = 1000


class TransportError(ConnectionError):
    """The other end has closed the connection, or does not have the secret."""


class DecodeError(TransportError):
    """The received bytes are not a message, or the message does not have the fields that its receiver expects."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a connection or a server."""

    timeout_seconds: float
    """Maximum seconds that one send or receive may wait."""
    max_message_bytes: int
    """Maximum bytes of a message; a longer message ends its connection."""
    max_unauthenticated: int = 128
    """Maximum number of unauthenticated connections of a server. For a further one, it closes the oldest. Agents
    authenticate within milliseconds, so idle connections cannot keep them out."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


class Connection:
    """One end of a connection, authenticated by `handshake`. One thread may send while another one receives."""

    def __init__(self, connected: socket.socket, limits: Limits) -> None:
        self.socket, self._limits = connected, limits
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The socket blocks, and the kernel times out. With Python's timeouts, MSG_WAITALL returns after each packet.
        connected.settimeout(None)
        self._set_timeout(min(limits.timeout_seconds, HANDSHAKE_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def local_address(self) -> str:
        """The address at which the other end's machine reaches this machine."""
        return _numeric(self.socket.getsockname())

    @property
    def peer_address(self) -> str:
        """The address of the other end."""
        return _numeric(self.socket.getpeername())

    def _set_timeout(self, seconds: float) -> None:
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, value)

    def close(self) -> None:
        """Close the connection. A thread that waits in `send` or `receive` gets an error."""
        self.shut_down()
        self.socket.close()

    def shut_down(self) -> None:
        """End the connection. Its thread then closes it: a close here would free the descriptor that the thread has."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def handshake(self, secret: str, purpose: str, *, is_server: bool) -> None:
        """Prove to the other end that this end has the secret for this purpose, and demand the same proof.

        Raises:
            TransportError: the other end does not have the secret, or closed the connection.
            TimeoutError: the other end did not send its proof in time.
        """
        deadline, own = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_bytes(_CHALLENGE_BYTES)
        if not is_server:
            self.send_bytes(own)
        other = self._read(_CHALLENGE_BYTES, deadline)
        challenges = [other, own] if is_server else [own, other]

        def derive(role: str, use: str) -> bytes:
            return _mac(secret.encode(), b"torchrelay", purpose.encode(), role.encode(), use.encode(), *challenges)

        own_role, other_role = ("server", "client") if is_server else ("client", "server")
        if is_server:
            self.send_bytes(own + derive(own_role, "proof"))
        if not hmac.compare_digest(self._read(_MAC_BYTES, deadline), derive(other_role, "proof")):
            raise TransportError("the other end does not have the run's secret")
        if not is_server:
            self.send_bytes(derive(own_role, "proof"))
        self._send_key, self._receive_key = derive(own_role, "key"), derive(other_role, "key")
        self._set_timeout(self._limits.timeout_seconds)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError if the connection has ended, or if the other end takes nothing in time."""
        text = json.dumps(message, separators=(",", ":")).encode()
        mac = _mac(self._send_key, _NUMBER.pack(self._sent), text)
        self._sent += 1
        self.send_bytes(_LENGTH.pack(len(text)) + mac + text)

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            DecodeError: the received bytes are not a valid message of at most `max_message_bytes`.
            TransportError: the connection has ended.
            TimeoutError: nothing came in time.
        """
        length = int(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        if length > self._limits.max_message_bytes:
            raise DecodeError(f"a message has {length} bytes, and {self._limits.max_message_bytes} are allowed")
        mac, text = self._read(_MAC_BYTES), self._read(length)
        if not hmac.compare_digest(mac, _mac(self._receive_key, _NUMBER.pack(self._received), text)):
            raise DecodeError("a message was altered, repeated or added on its way")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"a message is not JSON: {type(error).__name__}") from error
        if not isinstance(message, dict):
            raise DecodeError("a message is not a JSON object")
        return message

    def send_bytes(self, content: bytes) -> None:
        """Send bytes without an HMAC: bulk data, for which another message has the checksums."""
        try:
            self.socket.sendall(content)
        except BlockingIOError:
            raise TimeoutError("the other end has taken nothing in time") from None

    def receive_bytes(self, into: memoryview, deadline: float = float("inf")) -> None:
        """Fill a buffer with bulk data, which the caller must check. Raises TransportError or TimeoutError."""
        received = 0
        while received < len(into):
            try:
                count = self.socket.recv_into(into[received:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError("the other end has sent nothing in time") from None
            if not count:
                raise TransportError("the other end has closed the connection")
            received += count
            if received < len(into) and time.monotonic() > deadline:
                raise TimeoutError("the other end is too slow")

    def _read(self, count: int, deadline: float = float("inf")) -> bytes:
        content = bytearray(count)
        self.receive_bytes(memoryview(content), deadline)
        return bytes(content)


def _numeric(address: Sequence[Any]) -> str:
    # A socket for both versions of IP shows an IPv4 address as ::ffff:10.0.0.1.
    return str(address[0]).removeprefix("::ffff:")


def listen(ports: Sequence[int] = ()) -> socket.socket:
    """Listen at all addresses of this machine, on one of `ports`. If `ports` is empty, the kernel chooses the port.

    Raises:
        OSError: all ports are in use.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in random.SystemRandom().sample(ports, len(ports)) or [0]:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
    raise OSError(errno.EADDRINUSE, f"the ports {min(ports)} to {max(ports)} are all in use")


def pick_port(ports: Sequence[int] = ()) -> int:
    """Return a free port: one of `ports` or, if `ports` is empty, one below the ephemeral range.

    The choice is random, so that two jobs on one node hardly ever pick the same port.

    Raises:
        OSError: all ports that were tried are in use.
    """
    if not ports:
        first_ephemeral = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else _DEFAULT_EPHEMERAL
        ports = range(LOWEST_PORT, max(first_ephemeral, LOWEST_PORT + 1000))
    with listen(random.sample(ports, min(_TRIES, len(ports)))) as free:
        return int(free.getsockname()[1])


def connect(address: tuple[str, int], secret: str, purpose: str, limits: Limits) -> Connection:
    """Connect to a server of the same run.

    Raises:
        OSError: the server cannot be reached.
        TransportError: the process that listens there is not a server of this run.
    """
    timeout_seconds = min(limits.timeout_seconds, HANDSHAKE_SECONDS)
    connection = Connection(socket.create_connection(address, timeout_seconds), limits)
    try:
        connection.handshake(secret, purpose, is_server=False)
    except BaseException:
        connection.close()
        raise
    return connection


class Server:
    """A server that handles each authenticated connection in a thread of its own."""

    def __init__(
        self, secret: str, purpose: str, serve: Callable[[Connection], None], limits: Limits,
        ports: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Listen on one of `ports`. If `ports` is empty, the kernel chooses the port.

        If `serve` raises an OSError, such as DecodeError, only its own connection is closed. Any other exception is a
        defect, which `check` raises.
        """
        self._secret, self._purpose, self._serve, self._limits = secret, purpose, serve, limits
        self._defect: Exception | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._unauthenticated, self._authenticated = dict[Connection, None](), set[Connection]()
        self._listener = listen(ports)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name=f"{purpose}-server").start()

    def check(self) -> None:
        """Raise an unexpected error of a connection's thread, once. Call this where an error ends the process."""
        defect, self._defect = self._defect, None
        if defect:
            raise defect

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = [*self._unauthenticated, *self._authenticated]
        for connection in connections:
            connection.shut_down()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = Connection(self._listener.accept()[0], self._limits)
                with self._lock:
                    full = len(self._unauthenticated) >= self._limits.max_unauthenticated
                    oldest = next(iter(self._unauthenticated)) if full else None
                    if oldest:
                        del self._unauthenticated[oldest]
                    self._unauthenticated[connection] = None
                if oldest:
                    oldest.shut_down()
                threading.Thread(target=self._converse, args=(connection,), daemon=True, name=self._purpose).start()
                # `accept` may block for long: a reference here would keep open a connection that has no thread.
                del connection, oldest
            except (OSError, RuntimeError):
                # A limit of files or threads is reached. A connection without a thread is closed once it is the oldest.
                self._closed.wait(_RETRY_SECONDS)

    def _converse(self, connection: Connection) -> None:
        try:
            connection.handshake(self._secret, self._purpose, is_server=True)
            with self._lock:
                self._unauthenticated.pop(connection, None)
                if self._closed.is_set():
                    return
                self._authenticated.add(connection)
            self._serve(connection)
        except DecodeError as error:
            # The other end has the secret, so it has a defect, which must not look like a lost node.
            print(f"torchrelay: a connection for {self._purpose} ends: {error}", file=sys.stderr)
        except OSError:
            pass
        except Exception as error:  # noqa: BLE001 - `check` raises it again
            self._defect = error
        finally:
            with self._lock:
                self._unauthenticated.pop(connection, None)
                self._authenticated.discard(connection)
            connection.close()
