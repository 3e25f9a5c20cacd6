"""The control channel between agents, over real sockets."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from support.cluster import ROOT
from support.waiting import wait_for

from hpc.base.transport import Connection, Limits, Server, TransportError, connect
from hpc.run.causes import Cause
from hpc.run.events.kinds import RankFailed
from jobs.control.channel import LOST_SECONDS, ControlClient, ControlServer
from jobs.control.messages import Answer, Directive, NodeStatus, Phase, RankHeartbeat, decode

LIMITS = Limits(timeout_seconds=10, max_message_bytes=2**20)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer("secret", 3)
    yield made
    made.close()


HEARTBEAT = RankHeartbeat(
    rank=3, step=7, phase="step", state="S", still_seconds=0.1, step_seconds=0.5, busy_seconds=None
)
FAILURE = RankFailed(
    node="n1",
    round=1,
    rank=3,
    restarts=0,
    started_at=1.0,
    failed_at=2.5,
    exit_code=-9,
    signal="SIGKILL",
    cause=Cause.CRASHED,
    step=7,
    detail="x",
)


def test_statuses_and_directives_arrive_whole(server: ControlServer) -> None:
    status = NodeStatus(node_rank=1, phase=Phase.RUNNING, round=2, port=7, heartbeats=(HEARTBEAT,), failures=(FAILURE,))
    client = ControlClient(["127.0.0.1"], server.port, "secret", status)
    wait_for(lambda: server.statuses().get(1) == status)
    server.directive = Directive(round=3, members=(1, 0), port=9, abort_count=1)
    wait_for(lambda: client.directive == server.directive)
    assert abs(client.clock_skew_seconds) < 10, "one machine has one clock, though it may be busy"
    client.report(phase=Phase.LEFT)
    client.close()
    assert server.statuses()[1].phase is Phase.LEFT


def test_the_address_at_which_the_head_answers_is_kept(server: ControlServer) -> None:
    """Its name is unknown here, and its first address is not one that anything can have."""
    hosts = ["head.invalid", "240.0.0.1", "127.0.0.1"]
    client = ControlClient(hosts, server.port, "secret", NodeStatus(node_rank=1))
    assert client.met.wait(30)
    assert (client.first_node_address, client.own_address) == ("127.0.0.1", "127.0.0.1")
    assert (server.address(1), server.own_address) == ("127.0.0.1", "127.0.0.1")
    client.close()


def test_agents_meet_over_ipv6(server: ControlServer) -> None:
    client = ControlClient(["::1"], server.port, "secret", NodeStatus(node_rank=1))
    assert client.met.wait(10)
    assert (client.first_node_address, server.address(1), server.own_address) == ("::1", "::1", "::1")
    client.close()


def test_directive_is_sent_when_it_has_changed_and_on_each_new_connection(server: ControlServer) -> None:
    """It names all members of a job: in every answer to thousands of nodes, it would keep the first node busy."""
    directives = Directive(round=1, members=(1, 2)), Directive(round=2, members=(2,))
    server.directive = directives[0]
    for expected in ([*directives[:1], None, directives[1], None], [directives[1], None]):
        answered = list[Directive | None]()
        with connect(("127.0.0.1", server.port), "secret", "control", LIMITS) as connection:
            for _ in expected:
                server.directive = directives[1] if len(answered) == 2 else server.directive
                connection.send(asdict(NodeStatus(node_rank=1)))
                answered.append(decode(connection.receive(), Answer).directive)
        assert answered == expected


@pytest.mark.parametrize("node_rank", [0, 3, 99, -1, "1", None, 1.5, [1], {}])
def test_node_that_is_not_in_the_job_is_not_heard(server: ControlServer, node_rank: object) -> None:
    """One with rank 99 ended the coordinator with an IndexError; one with rank 0 spoke for the first node."""
    with connect(("127.0.0.1", server.port), "secret", "control", LIMITS) as connection:
        connection.send({**asdict(NodeStatus(node_rank=1)), "node_rank": node_rank})
        with pytest.raises(TransportError, match="closed the connection"):
            connection.receive()
    assert not server.statuses()


@pytest.mark.parametrize(
    "wrong",
    [{"phase": "asleep"}, {"heartbeats": None}, {"heartbeats": [{}]}, {"failures": [[1]]}, {"caches": {"a": 1}},
     {"round": True}, {"exit_code": "0"}, {"port": 2.5}],
)  # fmt: skip
def test_malformed_status_ends_its_connection_alone(
    server: ControlServer, wrong: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(("127.0.0.1", server.port), "secret", "control", LIMITS) as connection:
        connection.send({**asdict(NodeStatus(node_rank=1)), **wrong})
        with pytest.raises(TransportError, match="closed the connection"):
            connection.receive()
    server.check()
    assert not server.statuses()
    assert "a message is not of the kind NodeStatus: " in capfd.readouterr().err


@pytest.mark.parametrize("answer", [{}, {"time": "now"}, {"time": 1.0, "directive": {"members": [None]}}])
def test_malformed_answer_directs_nobody(answer: dict[str, object], capfd: pytest.CaptureFixture[str]) -> None:
    def serve(connection: Connection) -> None:
        connection.receive()
        connection.send(answer)

    impostor = Server("secret", "control", serve, LIMITS)
    client = ControlClient(["127.0.0.1"], impostor.port, "secret", NodeStatus(node_rank=1))
    wait_for(lambda: "a message is not of the kind Answer: " in capfd.readouterr().out)
    client.check()
    assert not client.met.is_set()
    assert client.directive == Directive()
    client.close()
    impostor.close()


def test_agent_that_hangs_before_the_training_falls_silent(server: ControlServer) -> None:
    client = ControlClient(["127.0.0.1"], server.port, "secret", NodeStatus(node_rank=1), timeout_seconds=1)
    wait_for(client.met.is_set)
    wait_for(lambda: server.is_silent(1))
    client.report(phase=Phase.READY)
    wait_for(lambda: not server.is_silent(1))
    client.close()


def test_head_that_hangs_before_the_training_falls_silent() -> None:
    server = ControlServer("secret", 3, timeout_seconds=1)
    client = ControlClient(["127.0.0.1"], server.port, "secret", NodeStatus(node_rank=1))
    wait_for(client.met.is_set)
    wait_for(lambda: client.first_node_is_silent)
    server.report(phase=Phase.RUNNING)
    wait_for(lambda: not client.first_node_is_silent)
    client.close()
    server.close()


# For every line: for how long the agent of node 1 has been silent.
HEAD = """
import sys
from jobs.control.channel import ControlServer
server = ControlServer("secret", 3)
print(server.port, flush=True)
for _ in sys.stdin:
    print(server.silent_seconds(1), flush=True)
"""


@pytest.fixture
def head() -> Iterator["subprocess.Popen[str]"]:
    """The first node's agent, as a process."""
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HEAD], cwd=ROOT, text=True, bufsize=1, **pipes) as process:
        yield process
        process.kill()


def line_of(head: "subprocess.Popen[str]") -> str:
    assert head.stdout is not None
    return head.stdout.readline()


def test_killed_first_node_falls_silent(head: "subprocess.Popen[str]") -> None:
    client = ControlClient(["127.0.0.1"], int(line_of(head)), "secret", NodeStatus(node_rank=2))
    wait_for(client.met.is_set)
    assert client.silent_seconds < LOST_SECONDS
    head.kill()
    wait_for(lambda: client.silent_seconds > LOST_SECONDS)
    assert client.first_node_has_ended
    client.close()
