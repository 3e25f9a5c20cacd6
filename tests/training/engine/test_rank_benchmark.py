"""What ranks measure for `hpc doctor --nodes`."""

import json
import os
import sys
from collections.abc import Callable

import pytest
from support.trainings import Starter

from training.engine import rank_benchmark


def on_one_node() -> None:
    """In a rank: be the benchmark, and nothing else."""
    sys.exit(rank_benchmark.main())


def on_a_node_of_its_own() -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    on_one_node()


@pytest.mark.parametrize(("prepare", "nodes"), [(on_one_node, 1), (on_a_node_of_its_own, 3)])
def test_the_first_rank_of_each_node_prints_what_the_node_measured(
    start: Starter, prepare: Callable[[], None], nodes: int
) -> None:
    ranks = start(world_size=3, prepare=prepare)
    assert ranks.wait() == [0, 0, 0], ranks.output()
    printed = [line for line in ranks.output().splitlines() if line.startswith("benchmark: ")]
    assert len(printed) == nodes
    for line in printed:
        fields = json.loads(line.removeprefix("benchmark: "))
        assert (fields["world_size"], fields["device"], len(fields["teraflops"])) == (3, "CPU", 3 // nodes)
        assert min(fields["teraflops"]) > 0
        assert fields["all_reduce_gb_per_second"] > 0
        assert (fields["network_gb_per_second"] is None) == (nodes == 1)
