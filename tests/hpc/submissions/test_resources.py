"""What was not typed comes from the cluster, and what the cluster lacks is refused."""

import os

import pytest
from support.events import resources_of

from hpc.base.errors import UserError
from hpc.base.node_info import TorchBuild
from hpc.base.units import NodeRange, TimeLimit
from hpc.run.spec import Resources
from hpc.slurm.client import TESTBED_DIRECTORY
from hpc.slurm.sinfo import Partition, parse_partitions
from hpc.submissions.resources import local_resources, resolve_device, resolve_resources

FOR_GPUS, FOR_CPUS = TorchBuild(version="2.15", accelerator="CUDA 13.2"), TorchBuild(version="2.15", accelerator=None)
# As sinfo prints it: two kinds of node in one partition, one without GPUs, one that is down.
SINFO = """\
gpu*|up|1-00:00:00|4:00:00|1-infinite|4|16|gpu:a100:4(S:0-1)
gpu*|up|1-00:00:00|4:00:00|1-infinite|2|64+|gpu:h100:8(S:0-1),nvme:1
cpu|up|infinite|n/a|1-infinite|10|8|(null)
small|up|30:00|n/a|1-2|9|8|gpu:2
old|down|1:00:00|n/a|1-infinite|1|8|gpu:1
"""


@pytest.fixture
def partitions() -> list[Partition]:
    return parse_partitions(SINFO)


def test_what_is_not_asked_for_comes_from_the_cluster(partitions: list[Partition]) -> None:
    resolved = resolve_resources(resources_of(gpus_per_node="4"), partitions)
    assert (resolved.partition, resolved.cpus_per_gpu, resolved.time) == ("gpu", 4, TimeLimit.parse("4h"))
    small = resolve_resources(resources_of(gpus_per_node="2", partition="small"), partitions)
    assert small.time == TimeLimit.parse("30m")
    assert resolve_resources(resources_of(gpus_per_node="0", partition="cpu"), partitions).time == TimeLimit.parse("1d")
    # A share of these nodes' CPUs: the others, which have fewer, are not asked for.
    assert resolve_resources(resources_of(gpus_per_node="h100:2", nodes="2"), partitions).cpus_per_gpu == 8
    without_gpus = resolve_resources(resources_of(gpus_per_node="0", nodes="10", partition="cpu"), partitions)
    assert (without_gpus.ranks_per_node, without_gpus.cpus_per_node) == (1, 8)
    asked = resources_of(nodes="6", gpus_per_node="4", cpus_per_gpu=2, time="90m", partition="gpu")
    resolved = resolve_resources(asked, partitions)
    assert (resolved.nodes, resolved.cpus_per_gpu, resolved.time) == (asked.nodes, 2, asked.time)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("old", "old", "partition old is down: all others are down, too; try later"),
        ("cpu", None, "no default partition: use --partition with one of cpu"),
    ],
)
def test_cluster_without_a_partition_to_use_is_told(
    name: str, asked: str | None, message: str, partitions: list[Partition]
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_resources(Resources(partition=asked), [kind for kind in partitions if kind.name == name])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (resources_of(nodes="7"), "--nodes is 7, but partition gpu has 6"),
        (resources_of(nodes="3", gpus_per_node="8"), "--nodes is 3, but partition gpu has 2 with --gpus-per-node 8"),
        (resources_of(nodes="3", partition="small"), "--nodes is 3, but partition small allows 2 per job"),
        (resources_of(gpus_per_node="9"), "--gpus-per-node is 9, but partition gpu has a100:4 or h100:8 per node"),
        (Resources(partition="cpu"), "has 0 per node: use --gpus-per-node 0, or .* gpu, old, small"),
        (
            resources_of(gpus_per_node="v100:2"),
            "is v100:2, but partition gpu has a100:4 or h100:8 per node: use --gpus-per-node a100:4 or h100:8$",
        ),
        (
            resources_of(gpus_per_node="a100:2", partition="small"),
            "small has 2 per node: use --gpus-per-node 2, or one of the partitions gpu",
        ),
        (resources_of(gpus_per_node="0", partition="cpu", cpus_per_gpu=9), "has 8 per rank .*use --cpus-per-gpu 8"),
        (
            Resources(partition="gpus"),
            "--partition 'gpus' does not exist: use --partition with one of gpu, cpu, small, old",
        ),
        (Resources(partition="old"), "partition old is down"),
        (resources_of(time="25h"), "--time is 25h, but partition gpu allows 1d"),
        (resources_of(gpus_per_node="4", cpus_per_gpu=17), "--cpus-per-gpu is 17.*use --cpus-per-gpu 16 or fewer"),
    ],
)
def test_resources_that_the_partition_lacks_are_refused(
    asked: Resources, message: str, partitions: list[Partition]
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_resources(asked, partitions)
    assert "\n" not in str(caught.value)


def test_pretended_nodes_share_the_cpus_and_know_no_types_of_gpus() -> None:
    assert local_resources(resources_of(nodes="100", gpus_per_node="100")).cpus_per_gpu == 1
    assert local_resources(resources_of(gpus_per_node="0")).cpus_per_node == os.cpu_count()
    with pytest.raises(UserError, match=r"is a100:2, but --cluster local .*: use --gpus-per-node 2"):
        local_resources(resources_of(gpus_per_node="a100:2"))


def test_spares_are_nodes_too(partitions: list[Partition]) -> None:
    with pytest.raises(UserError, match="--nodes is 5 and --spares 2, but partition gpu has 6: use 6 or fewer"):
        resolve_resources(resources_of(nodes="5"), partitions, spares=2)
    assert resolve_resources(resources_of(nodes="5"), partitions, spares=1).nodes == NodeRange(5)


def on_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")


def test_gpus_that_were_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster(monkeypatch)
    assert resolve_device("auto", 4, "slurm", FOR_GPUS) == "cuda"
    assert resolve_device("auto", 4, "slurm", None) == "cuda", "of another environment's torch nothing is known"
    assert resolve_device("cpu", 4, "slurm", FOR_CPUS) == "cpu"
    assert resolve_device("auto", 0, "slurm", FOR_CPUS) == "auto"


def test_gpus_of_a_testbed_are_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(TESTBED_DIRECTORY / "slurm.conf"))
    assert resolve_device("auto", 4, "slurm", FOR_GPUS) == "auto"
    assert resolve_device("cuda", 4, "slurm", FOR_GPUS) == "cuda"


def test_devices_that_there_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster(monkeypatch)
    with pytest.raises(UserError, match=r"torch 2\.15 is built for CPUs alone: install one for GPUs, or"):
        resolve_device("auto", 1, "slurm", FOR_CPUS)
    with pytest.raises(UserError, match="--device is cuda, but --gpus-per-node 0 asks for no GPUs: leave one of them"):
        resolve_device("cuda", 0, "slurm", FOR_GPUS)
