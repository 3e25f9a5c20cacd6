"""The parts of the node agent that need no cluster, against real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import ROOT

from hpc.core.errors import TorchrelayError
from hpc.core.kernel import children, process_state
from hpc.core.nodedir import NodeDir
from jobs.agent import threads_per_rank
from jobs.ranks.local_ranks import LocalRanks
from jobs.ranks.rendezvous import NodeAllocation
from jobs.ranks.round import rank_environment
from jobs.ranks.torchrun import Torchrun, catches


def place(cluster: str = "slurm", nodes: int = 2, node_rank: int = 0, cpus: int | None = 2) -> NodeAllocation:
    names = tuple(f"n{number}" for number in range(nodes))
    return NodeAllocation(cluster=cluster, job_id="1", restart=0, node_rank=node_rank, hostnames=names, cpus=cpus)


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


# A pretended torchrun: its child, a keeper, has a child, the rank.
NESTED = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}], start_new_session={new}))"


def start(rank: str) -> Torchrun:
    keeper = NESTED.format(code=rank, new=False)
    return Torchrun([sys.executable, "-c", NESTED.format(code=keeper, new=True)], os.environ, Path("/"))


def test_exit_code_is_torchruns() -> None:
    with start("raise SystemExit(7)") as torchrun:
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 7


def test_only_ranks_that_can_take_a_signal_are_told() -> None:
    slow = "import signal, time; time.sleep(1); signal.signal(signal.SIGUSR2, lambda *_: exit(3)); time.sleep(300)"
    with start(slow) as torchrun:
        wait_for(torchrun.ranks)
        [rank] = torchrun.ranks()
        assert not catches(rank, signal.SIGUSR2)
        torchrun.tell(signal.SIGUSR2)
        assert torchrun.exit_code is None
        wait_for(lambda: catches(rank, signal.SIGUSR2))
        torchrun.tell(signal.SIGUSR2)
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 3
    assert not catches(rank, signal.SIGUSR2), "a process that has ended catches nothing"


def test_signals_to_all_processes_do_not_end_torchrun() -> None:
    with start("import os, signal; [os.kill(0, n) for n in (signal.SIGTERM, signal.SIGUSR2)]; exit(5)") as torchrun:
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 5


WAITING = "import time; time.sleep(300)"


def test_killed_torchrun_leaves_nothing() -> None:
    worker = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {WAITING!r}])"
    with start(worker) as torchrun:
        wait_for(lambda: torchrun.ranks() and children(torchrun.ranks()[0]))
        [rank] = torchrun.ranks()
        [loader] = children(rank)
    for pid in (rank, loader):
        wait_for(lambda pid=pid: process_state(pid) in {None, "Z"})


def test_nothing_outlives_a_killed_agent() -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from jobs.ranks.torchrun import Torchrun\n"
        f"keeper = [sys.executable, '-c', {NESTED.format(code=WAITING, new=True)!r}]\n"
        "with Torchrun(keeper, os.environ, Path('/')): time.sleep(300)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: children(agent.pid) and children(children(agent.pid)[0]))
    [torchrun] = children(agent.pid)
    agent.kill()
    agent.wait()
    wait_for(lambda: process_state(torchrun) in {None, "Z"})
    assert not children(torchrun)


def test_hung_rank_tells_where_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"import os, time; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2); time.sleep(300)"
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    nested = NESTED.format(code=NESTED.format(code=code, new=False), new=True)
    with Torchrun([sys.executable, "-c", nested], environment, Path("/")) as torchrun:
        wait_for(lambda: torchrun.ranks() and log.exists())
        torchrun.abort_ranks()
        wait_for(lambda: torchrun.exit_code is not None)
    assert "Fatal Python error: Aborted" in log.read_text()


def test_stopped_rank_is_killed() -> None:
    with start("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)") as torchrun:
        wait_for(lambda: [rank for rank in torchrun.ranks() if process_state(rank) == "T"])
        torchrun.abort_ranks()
        wait_for(lambda: torchrun.exit_code is not None)


@pytest.fixture
def ranks(tmp_path: Path) -> LocalRanks:
    memory = NodeDir(tmp_path)
    memory.make()
    return LocalRanks(memory, 2, "gpu01")


def keep(directory: Path, *program: str, rank: int = 5) -> int:
    keeper = ROOT / "jobs" / "rank.py"
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "1"}
    command = [sys.executable, "-S", str(keeper), str(directory), str(directory), *program]
    return subprocess.run(command, env=environment, check=False).returncode


def test_keeper_ends_as_its_rank_and_writes_down_why(tmp_path: Path, ranks: LocalRanks) -> None:
    assert keep(tmp_path, sys.executable, "-c", "print('fine')") == 0
    assert ranks.new_failures() == []
    assert keep(tmp_path, sys.executable, "-c", "raise ValueError('no luck')") == 1
    assert keep(tmp_path, sys.executable, "-c", "import os; os.abort()") == -signal.SIGABRT
    assert keep(tmp_path, "no-such-program") == 127
    raised, aborted, missing = ranks.new_failures()
    assert (raised.rank, raised.exit_code, raised.signal, raised.detail) == (5, 1, None, "ValueError: no luck")
    assert (aborted.exit_code, aborted.signal, aborted.detail) == (-6, "SIGABRT", ""), (
        "an older last line is not its own"
    )
    assert missing.detail.startswith("no-such-program cannot be started")
    assert [failure.cause for failure in (raised, aborted, missing)] == ["crashed"] * 3
    assert raised.started_at <= raised.failed_at <= aborted.started_at
    assert "fine" in (tmp_path / "rank-05.log").read_text()


def test_keeper_without_a_log_of_its_own(tmp_path: Path, ranks: LocalRanks) -> None:
    keeper = [sys.executable, "-S", str(ROOT / "jobs" / "rank.py"), str(tmp_path / "gone"), str(tmp_path)]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}
    command = [*keeper, sys.executable, "-c", "print('heard', flush=True); 1 / 0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written" in done.stdout
    assert "heard" in done.stdout
    [failure] = ranks.new_failures()
    assert "rank-00.log cannot be read" in failure.detail


def test_failure_that_cannot_be_written_down_ends_torchrun(tmp_path: Path) -> None:
    keeper = [sys.executable, "-S", str(ROOT / "jobs" / "rank.py"), str(tmp_path), str(tmp_path / "gone"), "false"]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}
    torchrun = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *keeper]
    assert subprocess.run(torchrun, env=environment, check=False).returncode == -signal.SIGKILL


def test_memory_that_was_emptied_is_made_again(tmp_path: Path, ranks: LocalRanks) -> None:
    shutil.rmtree(tmp_path)
    ranks.begin(2, ours=True)
    assert keep(tmp_path, "false") == 1
    assert len(ranks.new_failures()) == 1


def test_rank_does_not_outlive_its_keeper(tmp_path: Path, ranks: LocalRanks) -> None:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-S", str(ROOT / "jobs" / "rank.py"), str(tmp_path), str(tmp_path)]
    keeper = subprocess.Popen([*command, sys.executable, "-c", WAITING], env=environment)
    wait_for(lambda: children(keeper.pid))
    [rank] = children(keeper.pid)
    keeper.kill()
    keeper.wait()
    wait_for(lambda: process_state(rank) in {None, "Z"})
    assert ranks.new_failures() == []


def test_heartbeats_of_living_ranks_only(tmp_path: Path, ranks: LocalRanks) -> None:
    assert ranks.beats() == ()
    beat = {"rank": 5, "pid": os.getpid(), "step": 3, "phase": "step", "count": 1}
    NodeDir(tmp_path).heartbeat(1).write_text(json.dumps(beat).ljust(512))
    NodeDir(tmp_path).heartbeat(0).write_text(json.dumps({**beat, "pid": 2**22 + 1}))
    [seen] = ranks.beats()
    assert (seen.rank, seen.step, seen.phase, seen.still_seconds) == (5, 3, "step", 0.0)
    wait_for(lambda: ranks.beats()[0].still_seconds > 0.0)
    NodeDir(tmp_path).heartbeat(1).write_text(json.dumps({**beat, "count": 2}))
    assert ranks.beats()[0].still_seconds == 0.0
    ranks.begin(2, ours=True)
    assert ranks.beats() == ()
