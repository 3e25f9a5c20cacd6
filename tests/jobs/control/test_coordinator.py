"""The head node's agent, with what the others report to it."""

import time
from dataclasses import replace

import pytest

from hpc.core import ledger
from hpc.core.files import append_json_line
from hpc.core.kernel import steady_time
from hpc.spec import Recovery
from jobs.claim import event_file
from jobs.control import root_failure
from jobs.control.channel import ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.messages import Directive, Phase, RankFailure, RankHeartbeat
from jobs.node_attempt import NodeAttempt
from jobs.stop_request import StopRequest
from training.config.train_config import TrainConfig


def test_clock_that_is_set_back_hides_no_hang(node: NodeAttempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_failure, "_SETTLE_SECONDS", 0.0)
    node.run.events.mkdir()
    claimed = {"attempt": 1, "job_id": "7", "restart": 0, "nonce": "n", "port": 1, "nodes": ["gpu01"]}
    append_json_line(event_file(node.run, 1, 0).path, ledger.record("claimed", **claimed))
    node = replace(node, spec=replace(node.spec, train=TrainConfig(data="x"), recovery=Recovery(hang_timeout="1s")))
    server = ControlServer("secret")
    server.directive = Directive(round=1, members=(0,), port=1)
    coordinator = Coordinator(node, server, StopRequest())
    failure = RankFailure(
        node="gpu01", round=1, rank=0, started_at=steady_time() - 20, failed_at=steady_time() - 10, exit_code=1,
        signal=None, cause="crashed", step=7, detail="x",
    )  # fmt: skip
    server.report(phase=Phase.RUNNING, round=1, failures=(failure,))
    coordinator.poll()
    assert [event["cause"] for event in node.events("interruption")] == ["crashed"]
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - 3600)
    hung = RankHeartbeat(
        rank=0, step=9, phase="step", state="S", still_seconds=5.0, step_seconds=0.1, busy_seconds=None
    )
    server.report(heartbeats=(hung,))
    coordinator.poll()
    assert server.directive.abort_count == 1
    server.close()
