"""An agent's view of its own ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
from support.staging_nodes import hanging
from support.waiting import wait_for

from hpc.base.kernel import children
from hpc.run.nodedir import HeldNodeDir
from jobs import node_attempt
from jobs.control.channel import ControlServer
from jobs.node_attempt import NodeAttempt
from jobs.ranks import monitor
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.torchrun import PROCESS_WRAPPER
from jobs.stop_request import StopRequest


def test_rank_whose_node_emptied_the_memory_still_says_how_it_failed(
    node: NodeAttempt, held: HeldNodeDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "_INTERVAL_SECONDS", 0.0)
    node.run.events.mkdir()
    channel = ControlServer("secret", 1)
    ranks = NodeMonitor(node, held, channel, StopRequest())
    ranks.begin_round(1, {})
    # What systemd does at the user's logout (RemoveIPC=yes), and some clusters' epilogs; here for this run alone.
    subprocess.run(["find", str(held.files.path), "-user", str(os.getuid()), "-delete"], check=True)
    ranks.poll()
    wrapper = [sys.executable, "-S", str(PROCESS_WRAPPER), "rank", str(node.run.path), str(held.files.path), "false"]
    environment = {**os.environ, "RANK": "3", "LOCAL_RANK": "0"}
    assert subprocess.run(wrapper, env=environment, check=False).returncode == 1
    ranks.poll()
    assert [failure.rank for failure in channel.status.failures] == [3]
    assert capsys.readouterr().out.count("was emptied, and its snapshots are lost") == 1
    channel.close()


@pytest.mark.timeout(60)
def test_failure_is_reported_while_the_storage_hangs(
    node: NodeAttempt, held: HeldNodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_attempt, "HANGS_SECONDS", 1e9)  # who waits for an answer never goes on
    node.run.events.mkdir()
    channel = ControlServer("secret", 1)
    ranks = NodeMonitor(node, held, channel, StopRequest())
    failed = {
        "rank": 0, "restarts": 0, "started_at": 1.0, "failed_at": 2.0, "exit_code": 1, "signal": None,
        "out_of_memory": False, "step": None, "detail": "ValueError: x",
    }  # fmt: skip
    (held.files.exits / "1-0.json").write_text(json.dumps(failed))
    with hanging(node.run.events):
        ranks.poll()
        assert [failure.detail for failure in channel.status.failures] == ["ValueError: x"]
    channel.close()


@pytest.fixture
def shell(held: HeldNodeDir, request: pytest.FixtureRequest) -> Callable[[str], int]:
    """Starts shell commands as rank 3 without heartbeats, and returns the process id of its wrapper."""

    def start(command: str) -> int:
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, start_new_session=True)
        fields = {"rank": 3, "pid": process.pid, "started_at": time.monotonic()}
        (held.files.exits / f"running-{process.pid}.json").write_text(json.dumps(fields))
        request.addfinalizer(process.wait)
        request.addfinalizer(partial(os.killpg, process.pid, signal.SIGKILL))  # the last one comes first
        return process.pid

    return start


def test_stopped_rank_without_heartbeats_is_seen(
    node: NodeAttempt, held: HeldNodeDir, shell: Callable[[str], int]
) -> None:
    channel = ControlServer("secret", 1)
    ranks = NodeMonitor(node, held, channel, StopRequest()).ranks
    wrapper = shell("sleep 100; true")
    wait_for(lambda: [each.state for each in ranks.heartbeats()] == ["S"])
    os.kill(children(wrapper)[0], signal.SIGSTOP)
    wait_for(lambda: [each.state for each in ranks.heartbeats()] == ["T"])
    channel.close()


@pytest.mark.parametrize(
    ("command", "is_still"),
    [
        ("sleep 100", True),
        ("while sleep 0.1; do echo step; done", False),
        ("(while sleep 0.1; do printf .; done) & wait", False),
        ("while true; do true; done", False),
    ],
)
def test_ranks_without_heartbeats_live_while_they_compute_or_print(
    node: NodeAttempt, held: HeldNodeDir, monkeypatch: pytest.MonkeyPatch, shell: Callable[[str], int],
    command: str, is_still: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(monitor, "_MEASURE_SECONDS", 0.0)
    channel = ControlServer("secret", 1)
    ranks = NodeMonitor(node, held, channel, StopRequest()).ranks
    shell(command)
    began = time.monotonic()

    def still_seconds() -> float:
        [heartbeat] = ranks.heartbeats()
        assert (heartbeat.rank, heartbeat.phase) == (3, "unwatched")
        return heartbeat.still_seconds

    if is_still:
        wait_for(lambda: still_seconds() > 2.0)
    else:
        wait_for(lambda: still_seconds() < 1.0 and time.monotonic() > began + 2.5)
    channel.close()
