"""The start of a round, on a node with a passing problem."""

import sys
from dataclasses import replace

import pytest

from hpc.core.nodedir import HeldNodeDir
from jobs.control.channel import ControlServer
from jobs.control.messages import Directive
from jobs.node_attempt import NodeAttempt
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.round import RankSetup, run_round
from jobs.stop_request import StopRequest

SETUP = RankSetup(data=None, python=sys.executable, threads=1)


@pytest.fixture
def channel() -> ControlServer:
    made = ControlServer("secret", 1)
    made.directive = Directive(round=1, members=(0,), port=1)
    return made


@pytest.fixture
def monitor(
    node: NodeAttempt, held: HeldNodeDir, channel: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> NodeMonitor:
    monkeypatch.setattr("jobs.ranks.monitor._INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("jobs.ranks.round._START_PAUSE_SECONDS", 0.0)
    node.run.code.mkdir()
    return NodeMonitor(node, held, channel, StopRequest())


def test_storage_that_is_away_for_a_moment_costs_no_node(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    node.run.logs.touch()  # no directory can be made in it

    def come_back() -> None:
        """In the retry; and once torchrun runs, end the round."""
        if node.run.logs.is_file():
            node.run.logs.unlink()
        else:
            channel.directive = replace(channel.directive, over=True)

    monitor.callbacks.append(come_back)
    assert run_round(node, channel, monitor, StopRequest(), channel.directive, SETUP) is None
    assert "round 1 cannot start on gpu01 yet, trying again" in capsys.readouterr().out
    assert node.run.attempt_logs(1).is_dir()


def test_name_that_stays_unknown_is_an_error(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.ranks.round._START_SECONDS", 0.5)
    names = (*node.allocation.hostnames, "gpu02.invalid")
    pair = replace(node, allocation=replace(node.allocation, hostnames=names))
    with pytest.raises(OSError, match=r"[Nn]ame"):
        run_round(pair, channel, monitor, StopRequest(), channel.directive, SETUP)


def test_round_that_is_over_is_not_started(node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor) -> None:
    node.run.logs.touch()
    channel.directive = Directive(round=2, members=(0,), port=1)
    assert run_round(node, channel, monitor, StopRequest(), Directive(round=1, members=(0,), port=1), SETUP) is None


def test_interpreter_that_stays_away_is_named(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.ranks.round._START_SECONDS", 0.0)
    gone = replace(SETUP, python="/removed/bin/python")
    with pytest.raises(OSError, match="gpu01 cannot run /removed/bin/python, the interpreter of the ranks"):
        run_round(node, channel, monitor, StopRequest(), channel.directive, gone)
