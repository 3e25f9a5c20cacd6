"""Which agent may take over from a head node that is lost to it."""

from jobs.ending import head_is_lost
from jobs.node_attempt import NodeAllocation


def allocation(node_rank: int, nodes: int) -> NodeAllocation:
    names = tuple(f"gpu{number:02d}" for number in range(1, nodes + 1))
    return NodeAllocation(cluster="slurm", job_id="7", restart=0, hostnames=names, node_rank=node_rank, cpus=2)


def test_last_agent_needs_no_confirmation() -> None:
    assert head_is_lost(["gpu01"], allocation(1, 2)) is True
    assert head_is_lost(["gpu02", "gpu01"], allocation(2, 3)) is True, "the head had lost the second one before"


def test_one_of_several_waits_for_a_second_report() -> None:
    assert head_is_lost(["gpu01"], allocation(2, 3)) is None
    assert head_is_lost(["gpu01", "gpu01"], allocation(2, 3)) is True


def test_agent_that_is_cut_off_leaves() -> None:
    assert head_is_lost(["gpu01", "gpu03"], allocation(2, 3)) is False
    assert head_is_lost(["gpu02", "gpu01"], allocation(1, 2)) is False
