"""The parts of the node agent that need no cluster, against real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc.errors import TorchrelayError
from jobs import torchrun
from jobs.agent import rank_environment, threads_per_rank
from jobs.rendezvous import Place
from jobs.torchrun import StopRequest, Watch, catches, children, tell


def place(cluster: str = "slurm", nodes: int = 2, node_rank: int = 0, cpus: int | None = 2) -> Place:
    names = tuple(f"n{number}" for number in range(nodes))
    return Place(cluster=cluster, job_id="1", restart=0, node_rank=node_rank, hostnames=names, cpus=cpus)


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.fail("this test needs two cores, to take one away")
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_core")
def test_leaked_binding_is_an_error() -> None:
    with pytest.raises(TorchrelayError, match="lets the job use 1 of the 2 CPUs"):
        threads_per_rank(place(cpus=2), ranks=1)


@pytest.mark.usefixtures("one_core")
def test_one_core_is_enough_for_a_job_that_asked_for_one() -> None:
    assert threads_per_rank(place(cpus=1), ranks=4) == 1


def test_threads_do_not_oversubscribe() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(place(cpus=None), ranks=1) == cores
    assert threads_per_rank(place(cpus=None), ranks=cores) == 1
    assert threads_per_rank(place(cpus=None), ranks=cores * 10) == 1
    assert threads_per_rank(place("local", nodes=cores, cpus=None), ranks=1) == 1


def test_pretended_nodes_share_the_gpus() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    shares = [rank_environment(base, place("local", node_rank=node), 2, "127.0.0.1", 1) for node in (0, 1)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1", "2,3"]
    assert shares[0]["GLOO_SOCKET_IFNAME"] == "lo"
    on_cluster = rank_environment(base, place("slurm"), 2, "203.0.113.7", 3)
    assert on_cluster["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert on_cluster["OMP_NUM_THREADS"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in on_cluster


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Starts two children: one that has a handler for SIGUSR2 and says when it ran, one that has none and inherits
# ignoring, as ranks do.
PARENT = """
import subprocess, sys
handling = "import signal, sys, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))"
waiting = "import time; time.sleep(300)"
ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in (handling + "; time.sleep(300)", waiting)]
sys.exit(max(rank.wait() for rank in ranks[:1]) + (ranks[1].kill() or 0))
"""


def test_only_ranks_that_can_take_a_signal_are_told() -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, preexec_fn=torchrun.ignore_signals)  # noqa: PLW1509 - no threads here
    wait_for(lambda: len(children(parent.pid)) == 2)
    handling, ignoring = sorted(children(parent.pid))
    wait_for(lambda: catches(handling, signal.SIGUSR2))
    assert not catches(ignoring, signal.SIGUSR2)
    assert tell({handling, ignoring}, signal.SIGUSR2) == {handling}
    assert parent.wait(timeout=30) == 3
    assert not catches(handling, signal.SIGUSR2), "a process that has ended catches nothing"


def fake_torchrun(code: str, stop: StopRequest, *, patience_seconds: float = 60.0, superseded: bool = False) -> int:
    watch = Watch(stop=stop, patience_seconds=patience_seconds, superseded=lambda: superseded)
    return torchrun.run([sys.executable, "-c", code], os.environ, Path("/"), watch)


def asked_to_stop() -> StopRequest:
    stop = StopRequest()
    stop.handle(signal.SIGUSR2, None)
    return stop


WITH_RANK = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {rank!r}]))"


def test_exit_code_is_torchruns() -> None:
    assert fake_torchrun("raise SystemExit(7)", StopRequest()) == 7


def test_rank_that_does_not_stop_is_ended_when_patience_is_over() -> None:
    code = WITH_RANK.format(rank="import time; time.sleep(300)")
    assert fake_torchrun(code, asked_to_stop(), patience_seconds=1.0) != 0


def test_rank_gets_its_request_as_soon_as_it_can_take_it() -> None:
    slow = "import signal, time; time.sleep(1); signal.signal(signal.SIGUSR2, lambda *_: exit(0)); time.sleep(300)"
    assert fake_torchrun(WITH_RANK.format(rank=slow), asked_to_stop()) == 0


def test_torchrun_that_waits_in_vain_is_ended() -> None:
    assert fake_torchrun("import time; time.sleep(300)", StopRequest(), superseded=True) != 0


def test_signals_to_the_agent_do_not_reach_torchrun() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR2)"
    assert fake_torchrun(code, StopRequest()) == 0
