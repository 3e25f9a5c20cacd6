"""The connection between agents, over real sockets."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from cluster import ROOT

from jobs.control.channel import LOST_SECONDS, ControlClient, ControlServer
from jobs.control.messages import Directive, NodeStatus, Phase, RankFailure, RankHeartbeat


@pytest.fixture
def hub() -> Iterator[ControlServer]:
    made = ControlServer("secret")
    yield made
    made.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


BEAT = RankHeartbeat(rank=3, step=7, phase="step", state="S", still_seconds=0.1, step_seconds=0.5, busy_seconds=None)
FAILURE = RankFailure(
    node="n1",
    round=1,
    rank=3,
    started_at=1.0,
    failed_at=2.5,
    exit_code=-9,
    signal="SIGKILL",
    cause="crashed",
    step=7,
    detail="x",
)


def test_reports_and_orders_arrive_whole(hub: ControlServer) -> None:
    report = NodeStatus(node_rank=1, phase=Phase.RUNNING, round=2, port=7, beats=(BEAT,), failures=(FAILURE,))
    link = ControlClient("127.0.0.1", hub.port, "secret", report)
    wait_for(lambda: hub.reports().get(1) == report)
    hub.orders = Directive(round=3, members=(1, 0), port=9, aborts=1)
    wait_for(lambda: link.orders == hub.orders)
    assert abs(link.skew_seconds or 1.0) < 0.5, "one machine has one clock"
    link.tell(replace(report, phase=Phase.LEFT))
    link.close()
    assert hub.reports()[1].phase is Phase.LEFT


def test_strangers_are_not_heard(hub: ControlServer) -> None:
    link = ControlClient("127.0.0.1", hub.port, "guess", NodeStatus(node_rank=1))
    with socket.create_connection(("127.0.0.1", hub.port)) as noise:
        noise.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert noise.recv(100) == b""
    wait_for(lambda: link.silent_seconds > LOST_SECONDS)
    assert not hub.reports()
    link.close()


def test_an_agent_that_is_gone_falls_silent_at_both_ends(hub: ControlServer) -> None:
    link = ControlClient("127.0.0.1", hub.port, "secret", NodeStatus(node_rank=1))
    wait_for(hub.reports)
    assert (hub.silent_seconds(1) or 0.0) < LOST_SECONDS
    assert hub.silent_seconds(2) is None
    link.close()
    wait_for(lambda: (hub.silent_seconds(1) or 0.0) > LOST_SECONDS)


HEAD = "import time; from jobs.control.channel import Hub; print(Hub('secret').port, flush=True); time.sleep(300)"


LISTENER = """
import time
from jobs.control.channel import Hub
hub = Hub("secret")
print(hub.port, flush=True)
most, until = 0.0, time.monotonic() + 8
while time.monotonic() < until:
    most = max(most, hub.silent_seconds(1) or 0.0)
print(most)
"""


def test_who_was_suspended_does_not_take_the_others_for_silent() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        link = ControlClient("127.0.0.1", int(head.stdout.readline()), "secret", NodeStatus(node_rank=1))
        wait_for(lambda: link.skew_seconds is not None)
        head.send_signal(signal.SIGSTOP)
        time.sleep(LOST_SECONDS)
        head.send_signal(signal.SIGCONT)
        assert float(head.stdout.readline()) < LOST_SECONDS
        link.close()


def test_head_that_is_killed_falls_silent() -> None:
    with subprocess.Popen([sys.executable, "-c", HEAD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        link = ControlClient("127.0.0.1", int(head.stdout.readline()), "secret", NodeStatus(node_rank=2))
        wait_for(lambda: link.skew_seconds is not None)
        assert link.silent_seconds < LOST_SECONDS
        head.kill()
    wait_for(lambda: link.silent_seconds > LOST_SECONDS)
    link.close()
