"""The authenticated transport, over real sockets, with clients and servers that lack the secret."""
# ruff: noqa: SLF001  # a client without the secret does what the public methods do not

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.attacks import attack
from support.waiting import wait_for

from hpc.base import transport
from hpc.base.transport import Connection, Limits, Server, TransportError, connect, pick_port

SECRET, PURPOSE = "the run's secret", "test"
LIMITS = Limits(timeout_seconds=10, max_message_bytes=2_000_000)


def echo(connection: Connection) -> None:
    while True:
        connection.send({"echo": connection.receive()})


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers = list[Server]()

    def start(**options: int) -> Server:
        servers.append(Server(SECRET, PURPOSE, echo, Limits(timeout_seconds=30, max_message_bytes=1000, **options)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


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
    recorded = list[bytes]()

    class Recorder(Connection):
        def send_bytes(self, content: bytes) -> None:
            recorded.append(content)
            super().send_bytes(content)

    with Recorder(raw(server.port), LIMITS) as connection:
        connection.handshake(SECRET, PURPOSE, is_server=False)
        connection.send({"text": "again"})
        assert connection.receive() == {"echo": {"text": "again"}}
    with raw(server.port) as unauthenticated:
        for content in recorded:
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


def test_authenticated_connections_are_limited_and_none_is_cut(serve: Callable[..., Server]) -> None:
    server = serve(max_connections=2)
    with client(server.port) as first, client(server.port) as second:
        for connection in (first, second):
            connection.send({})
            assert connection.receive() == {"echo": {}}
        with client(server.port) as third, pytest.raises(TransportError):
            third.receive()
        first.send({})
        assert first.receive() == {"echo": {}}
    wait_for(lambda: not server._authenticated)
    assert works(server), "places are given back"


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
        connection._send_text(text)
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
