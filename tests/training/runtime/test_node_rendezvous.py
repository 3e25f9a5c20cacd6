"""The rendezvous of a round's torchruns: of real ones, as the agents start them, and of its handlers alone."""

import base64
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.cluster import ROOT
from support.waiting import wait_for
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from hpc.base.environment import RESTARTS
from hpc.base.kernel import process_state
from hpc.base.transport import Limits, TransportError, connect, pick_port
from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import Rendezvous, Torchrun, torchrun_argv
from training.runtime import node_rendezvous
from training.runtime.node_rendezvous import BACKEND, NodeRendezvous

SECRET = "the attempt's secret"


# --- torchruns ---

# A rank notes each of its starts, and ends when it is told to. It ignores SIGTERM: torchrun does, and it inherits that.
RANK = """
import os, pathlib, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
names = "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHRELAY_RESTARTS"
with open(here / f"starts-{rank}", "a") as log:
    print(*map(os.environ.get, names), file=log)
(here / f"environment-{rank}").write_text(str(os.environ))
(here / f"pid-{rank}").write_text(str(os.getpid()))
while not (here / f"end-{rank}").exists():
    time.sleep(0.05)
"""


def torchrun(directory: Path, rendezvous: Rendezvous) -> Torchrun:
    argv = torchrun_argv(rendezvous, 1, "127.0.0.1", sys.executable, [sys.executable, "-c", RANK, str(directory)])
    return Torchrun(argv, torchrun_environment(rendezvous, dict(os.environ)), ROOT)


@pytest.fixture
def pair() -> Rendezvous:
    return Rendezvous(
        run="r", attempt=1, secret=SECRET, round=1, num_nodes=2, host="localhost", port=pick_port(), node=0
    )


def starts(directory: Path, rank: int) -> list[str]:
    log = directory / f"starts-{rank}"
    return log.read_text().splitlines() if log.exists() else []


def test_when_a_rank_dies_the_ranks_of_all_nodes_are_restarted(tmp_path: Path, pair: Rendezvous) -> None:
    with torchrun(tmp_path, pair) as first, torchrun(tmp_path, replace(pair, node=1)) as second:
        wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        # torchrun's own limit for ranks that do not end is 30 s.
        wait_for(lambda: len(starts(tmp_path, 0)) == len(starts(tmp_path, 1)) == 2, 25)
        assert starts(tmp_path, 0) == starts(tmp_path, 1), "ranks that start together have the same store"
        assert len(set(starts(tmp_path, 0))) == 2, "and it is not that of the dead ones"
        assert starts(tmp_path, 0)[0].startswith("2 127.0.0.1 ")
        assert [start.split()[-1] for start in starts(tmp_path, 1)] == ["0", "1"], "also by another node's ranks"
        (tmp_path / "end-0").touch()
        pid = int((tmp_path / "pid-0").read_text())
        wait_for(lambda: process_state(pid) is None)
        assert first.exit_code is None, "it waits for the other one"
        (tmp_path / "end-1").touch()
        wait_for(lambda: first.exit_code is not None and second.exit_code is not None)
        assert (first.exit_code, second.exit_code) == (0, 0)
        assert SECRET not in (tmp_path / "environment-0").read_text()


def test_pickle_that_anybody_writes_to_the_store_is_not_read(tmp_path: Path, pair: Rendezvous) -> None:
    """torch's own backend c10d reads it."""
    alone, evil = replace(pair, num_nodes=1), tmp_path / "evil"

    class Pickled:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {evil}",)

    state = base64.b64encode(pickle.dumps(Pickled()))
    with torchrun(tmp_path, alone) as attacked:
        wait_for(lambda: starts(tmp_path, 0))
        with suppress(RuntimeError):
            store = TCPStore("127.0.0.1", alone.port, is_master=False, timeout=timedelta(seconds=2))
            store.set(f"torch.rendezvous.{alone.id}", state)
        time.sleep(1)  # torchrun looks five times
        assert not evil.exists()
        assert attacked.exit_code is None
        (tmp_path / "end-0").touch()
        wait_for(lambda: attacked.exit_code is not None)
        assert attacked.exit_code == 0
        assert len(starts(tmp_path, 0)) == 1


# --- handlers ---

Make = Callable[..., NodeRendezvous]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv(RESTARTS, "0")  # they set it for the ranks, which here this process would start
    port, made = pick_port(), list[NodeRendezvous]()

    def handler(node: int, secret: str = SECRET, num_nodes: int = 2) -> NodeRendezvous:
        parameters = RendezvousParameters(
            BACKEND, f"localhost:{port}", "r-1-1", num_nodes, num_nodes, "127.0.0.1", rank=str(node)
        )
        made.append(NodeRendezvous(parameters, secret))
        return made[-1]

    yield handler
    for each in made:
        each.shutdown()


@contextmanager
def meanwhile(call: Callable[[], object]) -> Iterator[None]:
    """Call something in a thread, which has to end in time once the block is over."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def meet(*members: NodeRendezvous) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [*pool.map(NodeRendezvous.next_rendezvous, members)]


def test_member_that_looks_late_starts_though_the_ranks_of_another_have_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of a few milliseconds, on nodes of which one is busy."""
    quick = make(0)
    monkeypatch.setattr(node_rendezvous, "_POLL_SECONDS", 1.0)
    late, found = make(1), list[RendezvousInfo]()

    def arrive() -> None:
        found.append(late.next_rendezvous())
        late.wait_for_end()

    with meanwhile(arrive):
        wait_for(lambda: quick.num_nodes_waiting() == 1)
        quick.next_rendezvous()
        quick.wait_for_end()
    assert [(info.rank, info.world_size) for info in found] == [(1, 2)]


def test_members_have_their_places_and_meet_again_and_again(make: Make) -> None:
    first, second, third = (make(node, num_nodes=3) for node in range(3))
    ports = set[int]()
    for _ in range(3):
        infos = meet(third, second, first)
        assert [(info.rank, info.world_size) for info in infos] == [(2, 3), (1, 3), (0, 3)]
        stores = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
        assert len(stores) == 1
        ports |= {port for _, port in stores}
        assert [each.num_nodes_waiting() for each in (first, second, third)] == [0, 0, 0]
    assert len(ports) == 3


def test_broken_connection_does_no_harm(make: Make) -> None:
    first, second = make(0), make(1)
    meet(first, second)
    assert second._connection is not None  # noqa: SLF001  # the network breaks it
    second._connection.close()  # noqa: SLF001
    assert second.num_nodes_waiting() == 0
    meet(first, second)


def test_ranks_are_not_restarted_without_those_of_a_node_that_has_ended(make: Make) -> None:
    first, second = make(0), make(1)
    meet(first, second)
    with meanwhile(first.wait_for_end):
        wait_for(lambda: second._report()["ended"])  # noqa: SLF001
        with pytest.raises(RendezvousClosedError, match="the ranks of another node have ended"):
            second.next_rendezvous()
        second.wait_for_end()


def test_torchrun_whose_first_member_has_ended_goes_on_until_its_ranks_need_it(make: Make) -> None:
    first, second = make(0), make(1)
    meet(first, second)
    first.shutdown()
    for _ in range(3):
        assert second.num_nodes_waiting() == 0
        time.sleep(node_rendezvous._POLL_SECONDS)  # noqa: SLF001
    with pytest.raises(RendezvousConnectionError, match="first node has ended"):
        second.next_rendezvous()
    second.wait_for_end()


@pytest.mark.parametrize("wrong", [{"node": "1"}, {"generation": None}, {"ended": 1}, {"master": "a"}, {"node": -1}])
def test_malformed_report_ends_its_connection_alone(make: Make, wrong: dict[str, object]) -> None:
    first, limits = make(0), Limits(timeout_seconds=10, max_message_bytes=2**12)
    port = first._server.port  # noqa: SLF001
    report = {"node": 1, "generation": 1, "ended": False, "master": ["", 0]}
    with connect(("127.0.0.1", port), SECRET, "r-1-1", limits) as connection:
        connection.send(report)
        assert connection.receive()["arrived"] == 1
        connection.send({**report, **wrong})
        with pytest.raises(TransportError, match="closed the connection"):
            connection.receive()
    assert first.num_nodes_waiting() == 1


@pytest.mark.parametrize(("node", "secret"), [(1, "guess"), (1, ""), (2, SECRET)])
def test_impostor_and_node_that_is_no_member_do_not_arrive(
    make: Make, monkeypatch: pytest.MonkeyPatch, node: int, secret: str
) -> None:
    monkeypatch.setattr(node_rendezvous, "_ARRIVAL_SECONDS", 1.0)
    first, other = make(0), make(node, secret)
    problems = list[BaseException]()

    def arrive() -> None:
        try:
            other.next_rendezvous()
        except RendezvousTimeoutError as error:
            problems.append(error)

    with meanwhile(arrive), pytest.raises(RendezvousTimeoutError, match="not all 2 nodes arrived"):
        first.next_rendezvous()
    assert problems
