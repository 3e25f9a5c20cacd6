"""The parts of the node agent that need no cluster, against real processes."""

import os
from collections.abc import Iterator

import pytest

from hpc.core.errors import TorchrelayError
from jobs.agent import threads_per_rank
from jobs.node_attempt import NodeAllocation
from jobs.ranks.round import rank_environment


def allocation(cluster: str = "slurm", nodes: int = 2, node_rank: int = 0, cpus: int | None = 2) -> NodeAllocation:
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
