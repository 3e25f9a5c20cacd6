"""Who may take a run over from a head node that it does not hear."""

from jobs.allocation import NodeAllocation
from jobs.ending import head_is_lost


def allocation(node_rank: int, nodes: int) -> NodeAllocation:
    names = tuple(f"gpu{number:02d}" for number in range(1, nodes + 1))
    return NodeAllocation(cluster="slurm", job_id="7", restart=0, hostnames=names, node_rank=node_rank, cpus=2)


def test_the_last_that_is_left_is_believed() -> None:
    assert head_is_lost(["gpu01"], allocation(1, 2)) is True
    assert head_is_lost(["gpu02", "gpu01"], allocation(2, 3)) is True, "the head had lost the second one before"


def test_one_of_several_waits_for_another_who_says_the_same() -> None:
    assert head_is_lost(["gpu01"], allocation(2, 3)) is None
    assert head_is_lost(["gpu01", "gpu01"], allocation(2, 3)) is True


def test_who_is_cut_off_leaves() -> None:
    assert head_is_lost(["gpu01", "gpu03"], allocation(2, 3)) is False
    assert head_is_lost(["gpu02", "gpu01"], allocation(1, 2)) is False
