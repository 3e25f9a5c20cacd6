"""The authenticated transport, over real sockets: ends without the secret, any messages, any change of their bytes."""
# ruff: noqa: SLF001  # a client without the secret does what the public methods do not

import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attacks import attack
from support.waiting import wait_for

from hpc.base import transport
from hpc.base.transport import Connection, Limits, Server, TransportError, connect, pick_port

SECRET, PURPOSE = "the run's secret", "test"
LIMITS = Limits(timeout_seconds=20, max_message_bytes=2_000_000)


class Wire(Connection):
    """A connection that remembers what it has sent, and may keep it back."""

    def __init__(self, connected: socket.socket, limits: Limits) -> None:
        super().__init__(connected, limits)
        self.sent = list[bytes]()
        self.keeps = False

    def send_bytes(self, content: bytes) -> None:
        self.sent.append(content)
        if not self.keeps:
            super().send_bytes(content)


def echo(connection: Connection) -> None:
    while True:
        connection.send({"echo": connection.receive()})


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server(SECRET, PURPOSE, echo, Limits(timeout_seconds=30, max_message_bytes=1000))
    yield started
    started.close()


def client(port: int, secret: str = SECRET, purpose: str = PURPOSE) -> Connection:
    return connect(("127.0.0.1", port), secret, purpose, LIMITS)


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def answer_to_a_challenge(unauthenticated: socket.socket) -> bytes:
    """The server's own challenge, and its proof for this one."""
    unauthenticated.sendall(bytes(32))
    return unauthenticated.recv(64, socket.MSG_WAITALL)


def works(server: Server) -> bool:
    with client(server.port) as connection:
        connection.send({"text": "ä"})
        return connection.receive() == {"echo": {"text": "ä"}}


def assert_ended_by_the_server(connection: Connection) -> None:
    with pytest.raises(TransportError, match="closed the connection"):
        connection.receive()


def is_closed(unauthenticated: socket.socket) -> bool:
    try:
        return unauthenticated.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("secret", "purpose"), [("guess", PURPOSE), ("", PURPOSE), (SECRET, "another purpose")])
def test_client_without_the_secret_or_for_another_purpose_is_refused(server: Server, secret: str, purpose: str) -> None:
    with pytest.raises(TransportError, match="does not have the run's secret"):
        client(server.port, secret, purpose)
    assert works(server)


def test_the_secret_is_never_on_the_wire(server: Server) -> None:
    with raw(server.port) as one, raw(server.port) as another:
        first, second = answer_to_a_challenge(one), answer_to_a_challenge(another)
    assert first[:32] != second[:32], "each challenge is a new one"
    assert first[32:] != second[32:]
    assert SECRET.encode() not in first + second


def test_reflected_proof_is_refused(server: Server) -> None:
    with raw(server.port) as unauthenticated:
        unauthenticated.sendall(answer_to_a_challenge(unauthenticated)[32:])
        assert is_closed(unauthenticated)


def test_client_that_replays_a_session_is_refused(server: Server) -> None:
    with Wire(raw(server.port), LIMITS) as connection:
        connection.handshake(SECRET, PURPOSE, is_server=False)
        connection.send({"text": "again"})
        assert connection.receive() == {"echo": {"text": "again"}}
    with raw(server.port) as unauthenticated:
        for content in connection.sent:
            unauthenticated.sendall(content)
        answer = unauthenticated.recv(64, socket.MSG_WAITALL)
        assert len(answer) == 64, "a challenge and a proof for it, as everybody gets"
        assert is_closed(unauthenticated)


def test_silent_client_times_out_sooner_than_a_client_that_is_known(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.5)
    with raw(server.port) as silent, raw(server.port) as half:
        half.sendall(bytes(31))
        assert is_closed(silent)
        assert is_closed(half)


def test_silent_server_does_not_hold_up_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError, match="sent nothing in time"):
        client(listener.getsockname()[1])


def test_idle_unauthenticated_connections_keep_no_agent_out(server: Server) -> None:
    idle = [raw(server.port) for _ in range(200)]
    try:
        assert works(server)
        assert is_closed(idle[0]), "the oldest made room"
        assert works(server)
    finally:
        for connection in idle:
            connection.close()


def test_a_thousand_hostile_connections_leave_no_thread_and_no_file(server: Server) -> None:
    def open_files() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    threads, files = threading.active_count(), open_files()
    attack(server.port, seed=1, connections=1000)
    wait_for(lambda: threading.active_count() <= threads)
    wait_for(lambda: open_files() <= files)
    assert works(server)


def test_oversized_message_is_refused_by_its_length(server: Server) -> None:
    with client(server.port) as connection:
        connection.send_bytes(transport._LENGTH.pack(2**32 - 1))
        assert_ended_by_the_server(connection)
    with client(server.port) as connection:
        connection.send({"text": "x" * 1000})
        with pytest.raises(TransportError):
            connection.receive()
    assert works(server)


@pytest.mark.parametrize("text", [b"[" * 900, b'{"a":' * 180, b"[1]", b"null", b"", b"\xff\xfe", b"{", b"NaN"])
def test_what_is_no_json_object_ends_the_connection(server: Server, text: bytes) -> None:
    with client(server.port) as connection:
        mac = transport._mac(connection._send_key, transport._NUMBER.pack(0), text)
        connection.send_bytes(transport._LENGTH.pack(len(text)) + mac + text)
        assert_ended_by_the_server(connection)
    assert works(server)


def test_closed_server_ends_its_connections(server: Server) -> None:
    with client(server.port) as connection:
        connection.send({})
        connection.receive()
        server.close()
        assert_ended_by_the_server(connection)
    with pytest.raises(OSError, match="refused"):
        client(server.port)


def test_defect_in_what_serves_a_connection_is_raised_once_and_ends_that_connection_alone() -> None:
    def serve(connection: Connection) -> None:
        connection.send({"answer": connection.receive()["question"]})

    server = Server(SECRET, PURPOSE, serve, LIMITS)
    server.check()
    with client(server.port) as connection:
        connection.send({})
        assert_ended_by_the_server(connection)
    with pytest.raises(KeyError, match="question"):
        server.check()
    server.check()
    with client(server.port) as connection:
        connection.send({"question": 1})
        assert connection.receive() == {"answer": 1}
    server.close()


def test_port_is_below_the_ephemeral_range() -> None:
    first_ephemeral = int(transport.EPHEMERAL.read_text().split()[0])
    assert all(10_000 <= pick_port() < first_ephemeral for _ in range(50))


def test_taken_ports_are_passed_over_and_no_free_port_is_an_error() -> None:
    with socket.create_server(("", 0)) as listener:
        taken, free = listener.getsockname()[1], pick_port()
        assert {pick_port((taken, free)) for _ in range(10)} == {free}
        with pytest.raises(OSError, match=f"the ports {taken} to {taken} are all in use"):
            pick_port((taken,))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=5)
VECTORS = [
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    "1870dd9db4c758c5db350012e8524e00b92d6c4b3df6ff08d636defa079b61fb",
    "0000000a85dc9edb8a3086dd4440eb13ac2afe9742d39f3898473d6978bad9b19891851c7b2273746570223a377d",
    "0000000277ff323694afba014f9bfab70061a009f0523f746403612ea25b748faf33133a7b7d",
]
"""A challenge, the client's proof, and two messages, computed from the description in `hpc/base/transport.py`."""
# Each example has a connection of its own.
properties = settings(max_examples=60, deadline=None, derandomize=True)


@contextmanager
def ends() -> Iterator[tuple[Wire, Connection]]:
    """The client's and the server's end of an authenticated connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Wire(socket.create_connection(listener.getsockname()), LIMITS)
        server = Connection(listener.accept()[0], LIMITS)
    with client, server:
        thread = threading.Thread(target=client.handshake, args=(SECRET, PURPOSE), kwargs={"is_server": False})
        thread.start()
        server.handshake(SECRET, PURPOSE, is_server=True)
        thread.join()
        yield client, server


def frames_of(client: Wire, messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """The bytes of each message."""
    before, client.keeps = len(client.sent), True
    for message in messages:
        client.send(message)
    client.keeps = False
    return client.sent[before:]


def received(client: Wire, server: Connection, content: bytes) -> list[dict[str, Any]]:
    """The messages that the server's end takes from these bytes, after which the connection ends."""
    with suppress(OSError):  # the server may have ended the connection
        client.send_bytes(content)
        client.socket.shutdown(socket.SHUT_WR)
    messages = list[dict[str, Any]]()
    with suppress(TransportError):
        while True:
            messages.append(server.receive())
    return messages


@properties
@given(MESSAGES, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_messages_arrive_unchanged_and_in_order_however_their_bytes_are_cut(
    messages: list[dict[str, Any]], pieces: list[int]
) -> None:
    with ends() as (client, server):
        content = b"".join(frames_of(client, messages))
        for size in pieces:
            client.send_bytes(content[:size])
            content = content[size:]
        assert received(client, server, content) == messages


@properties
@given(MESSAGES, st.data())
def test_an_altered_bit_ends_the_connection_before_its_message(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    with ends() as (client, server):
        frames = frames_of(client, messages)
        content = bytearray(b"".join(frames))
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        ends_of_frames = [sum(map(len, frames[: number + 1])) for number in range(len(frames))]
        whole = sum(end <= bit // 8 for end in ends_of_frames)
        assert received(client, server, bytes(content)) == messages[:whole]


@properties
@given(MESSAGES, st.data())
def test_what_is_cut_off_is_no_message(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    with ends() as (client, server):
        frames = frames_of(client, messages)
        length = data.draw(st.integers(0, sum(map(len, frames))))
        whole = sum(sum(map(len, frames[: number + 1])) <= length for number in range(len(frames)))
        assert received(client, server, b"".join(frames)[:length]) == messages[:whole]


@properties
@given(MESSAGES, st.data())
def test_repeated_left_out_or_exchanged_messages_end_the_connection(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    with ends() as (client, server):
        frames = frames_of(client, messages)
        order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
        right = next((at for at, number in enumerate(order) if number != at), len(order))
        assert received(client, server, b"".join(frames[number] for number in order)) == messages[:right]


@properties
@given(MESSAGES)
def test_reflected_messages_and_those_of_another_connection_are_refused(messages: list[dict[str, Any]]) -> None:
    with ends() as (client, server), ends() as (other, _):
        with suppress(OSError):
            server.send_bytes(b"".join(frames_of(client, messages)))
        with pytest.raises(TransportError, match="altered, repeated or added"):
            client.receive()
        assert received(client, server, b"".join(frames_of(other, messages))) == []


def test_the_bytes_of_a_session_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with different versions of Torchrelay must understand each other: these bytes are the protocol."""
    monkeypatch.setattr(secrets, "token_bytes", lambda count: bytes(range(count)))
    with ends() as (client, _):
        client.send({"step": 7})
        client.send({})
        assert [content.hex() for content in client.sent] == VECTORS
