"""Staging on several nodes, without Slurm: real agents' links, a process and a directory for each node."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.staging_nodes import Nodes, answer, contents, stage
from support.waiting import wait_for

from hpc.base.transport import Connection, Limits, Server, TransportError, connect
from jobs.staging.coordination import Address, CacheStatus, choose_owners
from jobs.staging.copy import Copy
from jobs.staging.copy_progress import StagingStopped
from jobs.staging.peers import ChunkStore, Peer, PeerError, PeerServer
from jobs.staging.source import SourceWalk

MB = 2**20
NODES = 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for number in range(60):
        (path / f"{number}.jpg").write_bytes(os.urandom(100_000))
    (path / "large").write_bytes(os.urandom(12 * MB))
    return path


@pytest.mark.parametrize("count", [1, NODES])
def test_source_is_read_once_and_every_node_has_all_of_it(nodes: Nodes, source: Path, count: int) -> None:
    answers = nodes.stage(source, count)
    size = sum(map(len, contents(source).values()))
    assert sum(result["bytes_from_source"] for result in answers) == size
    assert all(result["bytes_from_source"] + result["bytes_from_peers"] == size for result in answers)
    assert count == 1 or all(result["bytes_from_source"] < size / 2 for result in answers), "each node reads a part"
    assert all(contents(Path(result["path"])) == contents(source) for result in answers)
    assert not any(result["fallback"] for result in answers), "the only node waits for nobody"


def test_nodes_that_have_the_data_give_them_to_those_that_have_not(nodes: Nodes, source: Path) -> None:
    nodes.stage(source, 2)
    answers = nodes.stage(source, 3, job="next")
    assert [result["reused"] for result in answers] == [True, True, False]
    assert [result["bytes_from_source"] for result in answers] == [0, 0, 0]
    assert contents(Path(answers[2]["path"])) == contents(source)


def test_nodes_whose_copies_are_damaged_read_the_source_once(nodes: Nodes, source: Path) -> None:
    for result in nodes.stage(source, 2):
        next(path for path in sorted(Path(result["path"]).rglob("*")) if path.is_file()).unlink()
    answers = nodes.stage(source, 2, job="next")
    assert [(result["reused"], result["fallback"]) for result in answers] == [(False, None)] * 2
    assert sum(result["bytes_from_source"] for result in answers) == sum(map(len, contents(source).values()))
    assert all(contents(Path(result["path"])) == contents(source) for result in answers)


def test_archive_is_read_once_and_unpacked_on_every_node(nodes: Nodes, source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "data.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", source, "."], check=True)
    answers = nodes.stage(archive)
    assert sum(result["bytes_from_source"] for result in answers) == archive.stat().st_size
    assert all(contents(Path(result["path"])) == contents(source) for result in answers)
    assert not list(tmp_path.glob("disk-*/torchrelay-*/**/data.tar.gz")), "the archive itself is not kept"
    assert [result["reused"] for result in nodes.stage(archive, job="next")] == [True] * NODES


def test_two_jobs_at_once_copy_once_per_node(nodes: Nodes, source: Path) -> None:
    jobs = [nodes.start(source, job=f"job-{number}") for number in range(2)]
    answers = [[answer(process) for process in job] for job in jobs]
    for first, second in zip(*answers, strict=True):
        assert sorted([first["reused"], second["reused"]]) == [False, True]
        assert contents(Path(first["path"])) == contents(source)


def test_node_that_dies_costs_the_others_a_second_read(nodes: Nodes, source: Path) -> None:
    (source / "larger").write_bytes(os.urandom(200 * MB))
    started = nodes.start(source)
    partial = nodes.disk(2) / f"torchrelay-{os.getuid()}"
    wait_for(lambda: [path for path in partial.glob(".*.partial/data/*") if path.stat().st_size])
    started[2].send_signal(signal.SIGKILL)
    answers = [answer(process) for process in started[:2]]
    assert all(contents(Path(result["path"])) == contents(source) for result in answers)
    for result in answers:
        assert "127.0.0.3" in result["fallback"]
    staged = nodes.events("staged")[0]
    assert staged["fallback"] == answers[0]["fallback"]


def test_node_that_cannot_stage_does_not_hold_up_the_others(nodes: Nodes, source: Path) -> None:
    nodes.disk(1).chmod(0o777)
    started = nodes.start(source)
    answers = [answer(started[rank]) for rank in (0, 2)]
    assert all(contents(Path(result["path"])) == contents(source) for result in answers)
    assert started[1].wait(60) != 0


def test_first_node_that_cannot_stage_does_not_hold_up_the_others(nodes: Nodes, source: Path) -> None:
    nodes.disk(0).chmod(0o777)
    started = nodes.start(source)
    assert started[0].wait(60) != 0
    for rank in (1, 2):
        # Without a first node there is no job; but each must have ended by itself.
        started[rank].communicate(timeout=60)


# --- what travels between two nodes ---


@pytest.fixture
def server(source: Path, tmp_path: Path) -> Iterator[PeerServer]:
    """A node that has all of the data."""
    (tmp_path / "disk").mkdir()
    listing, copy = SourceWalk(source).run(), stage(source, tmp_path / "disk").path
    server = PeerServer("secret")
    server.listings[listing.version] = listing.pack()
    server.chunk_stores[listing.version] = store = ChunkStore(listing, copy)
    yield server
    server.close()
    store.close()


def test_peer_without_the_secret_gets_nothing(server: PeerServer, source: Path) -> None:
    with pytest.raises(PeerError, match="does not have the run's secret"):
        Peer(Address("gpu01", "127.0.0.1", server.port), "guess", SourceWalk(source).run().version).listing()


def test_batch_that_is_not_what_was_read_is_refused(server: PeerServer, source: Path) -> None:
    listing = SourceWalk(source).run()
    server.chunk_stores[listing.version].put(0, ("0" * 64,) * len(listing.batches[0]))
    peer = Peer(Address("gpu01", "127.0.0.1", server.port), "secret", listing.version)
    with closing(peer), pytest.raises(PeerError, match=r"what gpu01 sent is not what it had read"):
        peer.receive(memoryview(bytearray(listing.batches[0][0].length)), peer.ask(0)[0])


def test_owner_that_fails_reports_it_to_waiting_peers(server: PeerServer, source: Path) -> None:
    listing = SourceWalk(source).run()
    threading.Timer(0.3, server.chunk_stores[listing.version].fail, ["its disk is full"]).start()
    peer = Peer(Address("gpu01", "127.0.0.1", server.port), "secret", listing.version)
    with closing(peer), pytest.raises(PeerError, match="its disk is full"):
        peer.ask(1)


def test_owner_that_is_stopped_reports_it_to_waiting_peers(source: Path, tmp_path: Path) -> None:
    listing = SourceWalk(source).run()
    store = ChunkStore(listing, tmp_path)
    with pytest.raises(StagingStopped):
        Copy(listing, tmp_path, store).run((), ("gpu01", 1), "secret", lambda _: True)
    assert store.answer(len(listing.batches)) == {"failed": "it gave up (StagingStopped)"}
    store.close()


@pytest.mark.parametrize("asked", [{}, {"version": 1, "batch": 0}, {"version": "x", "batch": None}, {"batch": "0"}])
def test_malformed_request_ends_its_connection_alone(server: PeerServer, asked: dict[str, object]) -> None:
    limits = Limits(timeout_seconds=10, max_message_bytes=2**12)
    with connect(("127.0.0.1", server.port), "secret", "staging", limits) as connection:
        connection.send(asked)
        with pytest.raises(TransportError, match="closed the connection"):
            connection.receive()
    server.check()


@pytest.mark.parametrize("answer", [{}, {"bytes": -1, "checksum": ""}, {"bytes": 2**80, "checksum": ""}])
def test_malformed_answer_is_no_listing_and_no_batch(source: Path, answer: dict[str, object]) -> None:
    def serve(connection: Connection) -> None:
        while connection.receive():
            connection.send(answer)

    other = Server("secret", "staging", serve, Limits(timeout_seconds=10, max_message_bytes=2**12))
    with closing(Peer(Address("gpu01", "127.0.0.1", other.port), "secret", SourceWalk(source).run().version)) as peer:
        with pytest.raises(PeerError, match="does not send the listing"):
            peer.listing()
        with pytest.raises(PeerError, match="another node of the job sent"):
            peer.ask(0)
    other.close()


def test_owners_have_the_data_or_are_about_to_read_them() -> None:
    a, b, c, d = (Address(f"gpu0{number}", f"10.0.0.{number}", 9) for number in range(1, 5))
    reading = [(a, CacheStatus.MISSING), (b, CacheStatus.WAITING), (c, CacheStatus.MISSING)]
    assert choose_owners(reading) == (a, c)
    assert choose_owners([*reading, (d, CacheStatus.COMPLETE)]) == (d,)
    assert choose_owners([*reading, (d._replace(port=0), CacheStatus.COMPLETE)]) == (a, c)
    assert choose_owners([(a, CacheStatus.UNAVAILABLE), (b, CacheStatus.UNAVAILABLE)]) == ()
    assert choose_owners([(a, CacheStatus.UNAVAILABLE), (b, CacheStatus.WAITING)]) is None
    assert choose_owners([]) is None
