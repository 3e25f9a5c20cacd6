"""The head node's agent, with what the others report to it."""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from support.events import claimed, train_started, write_events
from support.waiting import wait_for

from hpc.core.kernel import steady_time
from hpc.core.transport import Limits, connect
from hpc.spec import Recovery
from jobs.control.channel import ControlClient, ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Directive, NodeStatus, Phase, RankFailure, RankHeartbeat
from jobs.node_attempt import NodeAttempt
from jobs.stop_request import StopRequest
from training.config.train_config import TrainConfig

LIMITS = Limits(timeout_seconds=10, max_message_bytes=2**20)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer("secret", 7)
    made.directive = Directive(round=1, members=(0,), port=1)
    yield made
    made.close()


def coordinate(node: NodeAttempt, server: ControlServer, hosts: tuple[str, ...] = ("gpu01",)) -> Coordinator:
    """The coordinator of an attempt that trains."""
    write_events(node.run, claimed(nodes=hosts), file="attempt-001-node-00.jsonl")
    spec = replace(node.spec, train=TrainConfig(data="x"), recovery=Recovery(hang_timeout="1s"))
    allocation = replace(node.allocation, hostnames=hosts)
    server.directive = Directive(round=1, members=tuple(range(len(hosts))), port=1)
    return Coordinator(replace(node, spec=spec, allocation=allocation), server, StopRequest())


def poll_until(coordinator: Coordinator, node: NodeAttempt, kind: str, count: int = 1) -> None:
    """Poll until the ledger has as many events of a kind."""

    def is_recorded() -> bool:
        coordinator.poll()
        return len(node.events(kind)) == count

    wait_for(is_recorded)


def test_loss_of_many_nodes_is_one_line(node: NodeAttempt, server: ControlServer) -> None:
    """A switch that fails takes hundreds of nodes."""
    coordinator = coordinate(node, server, tuple(f"gpu{number:03d}" for number in range(1, 8)))
    for rank in range(1, 7):
        status = NodeStatus(node_rank=rank, phase=Phase.RUNNING, round=1)
        with connect(("127.0.0.1", server.port), "secret", "control", LIMITS) as connection:
            connection.send(asdict(status))
            connection.receive()
    wait_for(lambda: all(server.is_silent(rank) for rank in range(1, 7)))
    coordinator.poll()
    [interruption] = node.events("interruption")
    assert interruption["detail"] == "lost contact with gpu002 ... gpu007 (6)"
    assert len(node.events("node_lost")) == 6


def hung(rank: int, state: str = "S") -> RankHeartbeat:
    return RankHeartbeat(
        rank=rank, step=9, phase="step", state=state, still_seconds=5.0, step_seconds=0.1, busy_seconds=None
    )


@pytest.mark.parametrize(("states", "cause", "bad_nodes"), [("SD", "bad_node", {1}), ("DD", "hang", set[int]())])
def test_node_where_a_rank_cannot_be_killed_is_left_out(
    node: NodeAttempt, server: ControlServer, states: str, cause: str, bad_nodes: set[int]
) -> None:
    """Unless it is so on several nodes: then it is their storage."""
    coordinator = coordinate(node, server, ("gpu01", "gpu02"))
    server.report(phase=Phase.RUNNING, round=1, heartbeats=(hung(0, states[0]),))
    client = ControlClient(
        ["127.0.0.1"], server.port, "secret",
        NodeStatus(node_rank=1, phase=Phase.RUNNING, round=1, heartbeats=(hung(1, states[1]),)),
    )  # fmt: skip
    assert client.met.wait(30)
    coordinator.poll()
    client.close()
    [interruption] = node.events("interruption")
    assert (interruption["cause"], coordinator.bad_nodes, coordinator.stuck) == (cause, bad_nodes, bad_nodes)
    assert interruption["node"] == ("gpu02" if bad_nodes else None)


def test_ranks_that_wait_for_a_dead_node_are_no_hang(node: NodeAttempt, server: ControlServer) -> None:
    """The node may be found dead, and its ranks hanging, in the same moment."""
    coordinator = coordinate(node, server, ("gpu01", "gpu02"))
    server.report(phase=Phase.RUNNING, round=1, heartbeats=(hung(0),))
    status = NodeStatus(node_rank=1, phase=Phase.RUNNING, round=1, heartbeats=(hung(1),))
    with connect(("127.0.0.1", server.port), "secret", "control", LIMITS) as connection:
        connection.send(asdict(status))
        connection.receive()
    wait_for(lambda: (server.silent_seconds(1) or 0.0) > 1.0)  # before, a hang would be none of its doing
    poll_until(coordinator, node, "node_lost")
    coordinator.poll()
    assert [event["cause"] for event in node.events("interruption")] == ["node_failure"]
    assert server.directive.abort_count == 0


def test_progress_counts_though_the_ranks_train_again_before_their_failure_is_known(
    node: NodeAttempt, server: ControlServer
) -> None:
    coordinator, now = coordinate(node, server), steady_time()
    failures = tuple(
        RankFailure(
            node="gpu01", round=1, rank=0, started_at=now - started, failed_at=now - failed, exit_code=1, signal=None,
            cause="crashed", step=step, detail=detail,
        )
        for started, failed, step, detail in ((30, 20, 120, "ValueError: x"), (19, 1, 130, "KeyError: y"))
    )  # fmt: skip
    write_events(node.run, train_started(now - 29, 0), train_started(now - 18, 118), file="attempt-001-trainer.jsonl")
    for number in (1, 2):
        server.report(phase=Phase.RUNNING, round=1, failures=failures[:number])
        poll_until(coordinator, node, "interruption", number)
    interruptions = node.events("interruption")
    assert [event["step"] for event in interruptions] == [120, 130]
    assert [event["pause_seconds"] for event in interruptions] == [0.0, 0.0], "118 new steps lie between the two"


def test_clock_that_is_set_back_hides_no_hang(
    node: NodeAttempt, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinate(node, server)
    failure = RankFailure(
        node="gpu01", round=1, rank=0, started_at=steady_time() - 20, failed_at=steady_time() - 10, exit_code=1,
        signal=None, cause="crashed", step=7, detail="x",
    )  # fmt: skip
    server.report(phase=Phase.RUNNING, round=1, failures=(failure,))
    poll_until(coordinator, node, "interruption")
    assert [event["cause"] for event in node.events("interruption")] == ["crashed"]
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - 3600)
    server.report(heartbeats=(hung(0),))
    coordinator.poll()
    assert server.directive.abort_count == 1
