"""The start of a round, on a node with a passing problem, or one that its site's own check finds bad."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.events import resources_of

from hpc.base.errors import BadNodeError, TorchrelayError
from hpc.base.kernel import children
from hpc.run.nodedir import HeldNodeDir
from hpc.run.spec import Recovery
from jobs.control.channel import ControlServer
from jobs.control.messages import Directive
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.ranks import health_check
from jobs.ranks.health_check import check_health
from jobs.ranks.monitor import NodeMonitor
from jobs.ranks.rank_environment import RankSetup, rank_environment, threads_per_rank
from jobs.ranks.round import run_round
from jobs.ranks.torchrun import Standby
from jobs.stop_request import StopRequest

SETUP = RankSetup(data=None, python=sys.executable, standby=Standby())


@pytest.fixture
def channel() -> ControlServer:
    made = ControlServer("secret", 1)
    made.directive = Directive(round=1, members=(0,), host="127.0.0.1", port=1)
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
    node.run.logs.rmdir()
    node.run.logs.touch()  # no directory can be made in it

    def come_back() -> None:
        """In the retry; and once torchrun runs, end the round."""
        if node.run.logs.is_file():
            node.run.logs.unlink()
            node.run.logs.mkdir()
        else:
            channel.directive = replace(channel.directive, over=True)

    monitor.callbacks.append(come_back)
    assert run_round(node, channel, monitor, StopRequest(), channel.directive, SETUP) is None
    assert "round 1 cannot start on gpu01 yet, trying again" in capsys.readouterr().out
    assert node.run.attempt_logs(1).is_dir()


@pytest.mark.parametrize(
    ("spares", "gigabytes", "waiting"),
    [(0, [9, 9, 9], [0, 0, 0]), (1, [9, 0, 0], [1, 1, 1]), (1, [1, 1, 9], [0, 0, 1])],
)
def test_torchrun_of_the_next_round_waits_if_the_job_can_lose_a_node_and_has_the_memory(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor, monkeypatch: pytest.MonkeyPatch,
    *, spares: int, gigabytes: list[int], waiting: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr("jobs.ranks.round._SETTLED_SECONDS", 0.0)
    monkeypatch.setattr("jobs.ranks.round._MEMORY_SECONDS", 0.0)
    available = iter(gigabytes)
    monkeypatch.setattr("jobs.ranks.round.available_memory_bytes", lambda: next(available) * 2**30)
    earlier = set(children(os.getpid()))
    spec = replace(node.spec, resources=resources_of(nodes="1"), recovery=Recovery(spares=spares))
    hostnames = ("gpu01", "gpu02")[: 1 + spares]
    node = replace(node, spec=spec, allocation=replace(node.allocation, hostnames=hostnames))
    polls = []

    def torchruns() -> int:
        return len(set(children(os.getpid())) - earlier)

    def end_round() -> None:
        polls.append(torchruns())
        if len(polls) == 3:
            channel.directive = replace(channel.directive, over=True)

    monitor.callbacks.append(end_round)
    with closing(Standby()) as standby:
        run_round(node, channel, monitor, StopRequest(), channel.directive, replace(SETUP, standby=standby))
        assert polls == [1 + each for each in waiting]
        assert torchruns() == waiting[-1], "it survives the round"


def test_round_that_is_over_is_not_started(node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor) -> None:
    node.run.logs.touch()
    first = channel.directive
    channel.directive = replace(first, round=2)
    assert run_round(node, channel, monitor, StopRequest(), first, SETUP) is None


def test_agents_that_are_asked_to_stop_read_no_files_of_other_nodes(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor
) -> None:
    """All of them are asked at once, while the ranks save to the same storage."""
    (node.run.events / "attempt-001-node-01.jsonl").mkdir(parents=True)  # to read it is an error
    stop, polls = StopRequest(), list[int]()

    def end_after_a_second_look() -> None:
        polls.append(1)
        channel.directive = replace(channel.directive, over=len(polls) > 1)

    monitor.callbacks.append(end_after_a_second_look)
    stop.handle(signal.SIGTERM, None)
    assert run_round(node, channel, monitor, stop, channel.directive, SETUP) is None
    assert len(polls) == 2


def test_interpreter_that_stays_away_is_named(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.ranks.round._START_SECONDS", 0.0)
    gone = replace(SETUP, python="/removed/bin/python")
    with pytest.raises(OSError, match="gpu01 cannot run /removed/bin/python, the interpreter of the ranks"):
        run_round(node, channel, monitor, StopRequest(), channel.directive, gone)


def checked(node: NodeAttempt, command: str) -> NodeAttempt:
    return replace(node, spec=replace(node.spec, recovery=Recovery(health_check=command)))


def test_node_is_bad_if_its_check_fails(node: NodeAttempt, monitor: NodeMonitor) -> None:
    check_health(checked(node, "read line || test -d /"), monitor)
    with pytest.raises(BadNodeError, match=r"--health-check 'exit 7' failed on gpu01 with exit code 7: see hpc logs"):
        check_health(checked(node, "exit 7"), monitor)


def test_check_that_hangs_is_killed_with_its_children(
    node: NodeAttempt, monitor: NodeMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "_SECONDS", 0.3)
    alive = tmp_path / "alive"
    with pytest.raises(BadNodeError, match=r"did not end within 0 s on gpu01"):
        check_health(checked(node, f"(while sleep 0.05; do touch {alive}; done) & wait"), monitor)
    time.sleep(0.2)
    alive.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not alive.exists()


def test_check_is_not_waited_for_when_the_attempt_is_over(
    node: NodeAttempt, channel: ControlServer, monitor: NodeMonitor
) -> None:
    channel.directive = replace(channel.directive, over=True)
    began = time.monotonic()
    check_health(checked(node, "sleep 100"), monitor)
    assert time.monotonic() - began < 50


# --- the environment of the ranks ---


def allocation(cluster: str = "slurm", nodes: int = 2, node_rank: int = 0, cpus: int | None = 2) -> NodeAllocation:
    names = tuple(f"n{number}" for number in range(nodes))
    return NodeAllocation(cluster=cluster, job_id="1", restart=0, node_rank=node_rank, hostnames=names, cpus=cpus)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One core to use on a machine of two, though this one may have no more than one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_core")
def test_leaked_binding_is_an_error() -> None:
    with pytest.raises(TorchrelayError, match="lets the job use 1 of the 2 CPUs"):
        threads_per_rank(allocation(cpus=2), num_ranks=1)


@pytest.mark.usefixtures("one_core")
def test_one_core_is_enough_for_a_job_that_asked_for_one() -> None:
    assert threads_per_rank(allocation(cpus=1), num_ranks=4) == 1


def test_threads_do_not_oversubscribe() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(allocation(cpus=None), num_ranks=1) == cores
    assert threads_per_rank(allocation(cpus=None), num_ranks=cores) == 1
    assert threads_per_rank(allocation(cpus=None), num_ranks=cores * 10) == 1
    assert threads_per_rank(allocation("local", nodes=cores, cpus=None), num_ranks=1) == 1


def test_pretended_nodes_share_the_gpus() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    shares = [rank_environment(base, allocation("local", node_rank=node), 2, "127.0.0.1", 1) for node in (0, 1)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1", "2,3"]
    assert shares[0]["GLOO_SOCKET_IFNAME"] == "lo"
    on_cluster = rank_environment(base, allocation("slurm"), 2, "203.0.113.7", 3)
    assert on_cluster["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert on_cluster["OMP_NUM_THREADS"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in on_cluster


def test_variables_that_the_user_chose_win() -> None:
    chosen = {
        "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1", "OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"
    }  # fmt: skip
    for interface in (None, "eth1"):
        assert chosen.items() <= rank_environment(chosen, allocation(), 1, "127.0.0.1", 3, interface).items()


def test_idle_threads_spin_only_on_cores_that_are_the_jobs_own() -> None:
    usable = len(os.sched_getaffinity(0))
    for shared in (allocation(cpus=usable + 1), allocation(cpus=None), allocation("local", cpus=usable)):
        assert rank_environment({}, shared, 1, "127.0.0.1", 3)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in rank_environment({}, allocation(cpus=usable), 1, "127.0.0.1", 3)


def test_interface_of_the_run_is_that_of_its_ranks() -> None:
    names = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert names.items() <= rank_environment({}, allocation(), 1, "127.0.0.1", 1, "eth1").items()


def test_rank_of_a_run_without_gpus_takes_none() -> None:
    assert rank_environment({}, allocation(), 0, "127.0.0.1", 1)["CUDA_VISIBLE_DEVICES"] == ""
    given = {"CUDA_VISIBLE_DEVICES": "2"}
    assert rank_environment(given, allocation(), 0, "127.0.0.1", 1)["CUDA_VISIBLE_DEVICES"] == "2", "by Slurm"
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment({}, allocation(), 1, "127.0.0.1", 1)
