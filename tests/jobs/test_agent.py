"""The parts of the node agent that need no cluster, against real processes."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from support.cluster import ROOT, need
from support.events import recorded_run, records_in, resources_of

from hpc.base.errors import TorchrelayError
from hpc.run.events import ledger
from hpc.run.events.attempts import attempts_of
from hpc.run.events.history import History
from hpc.run.events.kinds import NodeLost
from hpc.run.rundir import RunDir
from jobs.agent import threads_per_rank
from jobs.node_attempt import NodeAllocation
from jobs.ranks.round import rank_environment


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


def test_interfaces_that_the_user_chose_win() -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}
    assert chosen.items() <= rank_environment(chosen, allocation("local"), 1, "127.0.0.1", 1).items()
    assert chosen.items() <= rank_environment(chosen, allocation(), 1, "127.0.0.1", 1, "eth1").items()


def test_openmp_settings_that_the_user_chose_win() -> None:
    chosen = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}
    assert chosen.items() <= rank_environment(chosen, allocation(), 1, "127.0.0.1", 3).items()


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


LIMITED = """
import resource
from jobs import agent
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
agent.main(["/no/such/run"])
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_agent_may_open_as_many_files_as_the_administrators_allow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, env={**os.environ, **LOCAL_JOB}, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.splitlines()[-1] == b"True"


LOCAL_JOB = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "1",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_GLOBALID": "0",
    "SUBMITIT_LOCAL_LOCALID": "0",
}  # fmt: skip
NO_MEMORY = """
mount -t tmpfs -o mode=1777,nr_inodes=2 none /dev/shm
mount -t tmpfs -o mode=1777,nr_inodes=2 none /tmp
"""
DEFECT = "import jobs.agent as agent; agent.NodeMonitor.poll = lambda _: [][0]; raise SystemExit(agent.main({argv}))"
# It shows in the thread of a connection, once the agents have met.
DEFECT_IN_THE_CHANNEL = """
import sys
from jobs import agent
from jobs.control import channel
decode, first = channel.decode, [1, 2, 3]
channel.decode = lambda message, kind: decode(message, kind) if first and first.pop() else message["no such field"]
sys.exit(agent.main({argv}))
"""


def start_agent(run: RunDir, mounts: str = "", code: str = "", rank: int = 0) -> "subprocess.Popen[str]":
    need("unshare", "mount")
    argv = ["-c", code.format(argv=[str(run.path)])] if code else ["-m", "jobs.agent", str(run.path)]
    script = f"{mounts}\nexec {shlex.join([sys.executable, *argv])}"
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **LOCAL_JOB, "SUBMITIT_LOCAL_GLOBALID": str(rank)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "cause", "reason"),
    [
        ({"mounts": NO_MEMORY}, "bad_node", "No space left on device"),
        ({"code": DEFECT}, "crashed", "IndexError: list index out of range"),
    ],
    ids=["no memory", "defect"],
)
def test_agent_that_fails_after_its_claim_ends_the_attempt_and_has_the_run_continue(
    shared: Path, broken: dict[str, str], cause: str, reason: str
) -> None:
    run = recorded_run(shared / "r", cluster="local")
    with start_agent(run, **broken) as agent:
        output, _ = agent.communicate(timeout=120)
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == cause, output
    assert reason in (attempt.detail or "")
    assert agent.returncode == LOCAL_REQUEUE_RETURN_CODE
    [requeued] = [event for event in records_in(run.events) if event["event"] == "requeued"]
    assert requeued["attempt"] == 1


def test_agent_of_another_node_that_fails_marks_its_node_as_bad(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_JOB, "SUBMITIT_LOCAL_NTASKS", "2")
    run = recorded_run(shared / "r", cluster="local", resources=resources_of(nodes="2"))
    with start_agent(run) as head, start_agent(run, mounts=NO_MEMORY, rank=1) as other:
        output, _ = head.communicate(timeout=120)
        other.communicate(timeout=120)
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == "bad_node", output
    assert "No space left on device" in (attempt.detail or "")
    assert (head.returncode, other.returncode) == (LOCAL_REQUEUE_RETURN_CODE, 0)


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_defect_in_the_control_channel_ends_its_agent_with_a_traceback_and_the_attempt_as_crashed(
    shared: Path, monkeypatch: pytest.MonkeyPatch, broken_rank: int
) -> None:
    monkeypatch.setitem(LOCAL_JOB, "SUBMITIT_LOCAL_NTASKS", "2")
    run = recorded_run(shared / "r", cluster="local", resources=resources_of(nodes="2"))
    codes = ["", ""]
    codes[broken_rank] = DEFECT_IN_THE_CHANNEL
    with start_agent(run, code=codes[0]) as head, start_agent(run, code=codes[1], rank=1) as other:
        outputs = [agent.communicate(timeout=120)[0] for agent in (head, other)]
    assert "Traceback" in outputs[broken_rank]
    [attempt] = attempts_of(ledger.read(run.events))
    assert attempt.cause == "crashed", outputs
    assert "KeyError: 'no such field'" in (attempt.detail or "")
    if broken_rank:  # a first node's agent that understands nobody also answers nobody
        assert not History.load(run).of(NodeLost)
