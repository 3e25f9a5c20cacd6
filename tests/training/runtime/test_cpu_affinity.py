"""The cores beside a GPU, on machines that are directories here."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.runtime.cpu_affinity import bind_to_cores, choose_cores
from training.runtime.run_context import RankInfo, rank_info_from

ALL = frozenset(range(64))
GPUS = [f"0000:{bus}:00.0" for bus in ("1b", "43", "9d", "c1")]
# Two sockets of 16 cores, each core with two threads.
CORES = {"0": "0-15,32-47", "1": "16-31,48-63"}


def machine(directory: Path, numa_nodes: str) -> Path:
    for gpu, node in zip(GPUS, numa_nodes.split(), strict=True):
        described = directory / "bus" / "pci" / "devices" / gpu / "numa_node"
        described.parent.mkdir(parents=True)
        described.write_text(f"{node}\n")
    for node, cores in CORES.items():
        listed = directory / "devices" / "system" / "node" / f"node{node}" / "cpulist"
        listed.parent.mkdir(parents=True)
        listed.write_text(f"{cores}\n")
    return directory


def local_rank(number: int) -> RankInfo:
    return replace(rank_info_from({}), local_rank=number, local_world_size=4)


def test_ranks_use_the_cores_beside_their_gpus(tmp_path: Path) -> None:
    found = [choose_cores(ALL, GPUS, local_rank(rank), machine(tmp_path / f"{rank}", "0 0 1 1")) for rank in range(4)]
    first, second = frozenset([*range(16), *range(32, 48)]), frozenset([*range(16, 32), *range(48, 64)])
    assert [share.cores for share in found] == [first, first, second, second]
    assert {share.per_rank for share in found} == {16}, "as many as without binding"


@pytest.mark.parametrize(
    ("numa_nodes", "allowed"),
    [
        ("0 0 0 0", ALL),  # all GPUs on one of two sockets
        ("0 0 1 1", frozenset(range(12, 32))),  # most cores of the job on the other socket
        ("0 0 1 1", frozenset(range(16, 32))),  # all of them
        ("-1 -1 -1 -1", ALL),  # one NUMA node
    ],
)
def test_no_rank_is_left_with_fewer_cores_than_an_equal_share(
    tmp_path: Path, numa_nodes: str, allowed: frozenset[int]
) -> None:
    share = choose_cores(allowed, GPUS, local_rank(0), machine(tmp_path, numa_nodes))
    assert share.cores == allowed
    assert share.per_rank == len(allowed) // 4


def test_an_unknown_machine_binds_nothing(tmp_path: Path) -> None:
    assert choose_cores(ALL, GPUS, local_rank(1), tmp_path).cores == ALL
    assert choose_cores(ALL, [], local_rank(1), tmp_path).cores == ALL


def test_a_rank_on_a_cpu_uses_all_cores_of_its_job() -> None:
    allowed = os.sched_getaffinity(0)
    share = bind_to_cores(torch.device("cpu"), local_rank(0))
    assert share.cores == allowed == os.sched_getaffinity(0)
    assert share.per_rank == len(allowed) // 4
