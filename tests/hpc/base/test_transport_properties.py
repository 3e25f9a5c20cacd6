"""The protocol between nodes, for any messages, and for anything that somebody on the network does to their bytes."""

import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc.base.transport import Connection, Limits, TransportError

SECRET, PURPOSE = "the run's secret", "test"
LIMITS = Limits(timeout_seconds=20, max_message_bytes=2**20)
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
