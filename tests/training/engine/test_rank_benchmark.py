"""Which pairs of nodes `hpc smoke` measures at the same time, and what two ranks measure."""

import json
import sys
from itertools import chain, combinations

import pytest
from support.trainings import Starter

from training.engine import rank_benchmark
from training.engine.rank_benchmark import pair_rounds


@pytest.mark.parametrize("nodes", range(1, 10))
def test_every_pair_is_in_one_round_and_no_node_in_two_pairs_of_it(nodes: int) -> None:
    rounds = pair_rounds(nodes)
    assert sorted(chain(*rounds)) == list(combinations(range(nodes), 2))
    for pairs in rounds:
        busy = list(chain(*pairs))
        assert len(busy) == len(set(busy))


def measure() -> None:
    """In a rank: be the benchmark, and nothing else."""
    sys.exit(rank_benchmark.main("here"))


def test_two_ranks_of_one_node_measure_their_devices_and_the_all_reduce(start: Starter) -> None:
    ranks = start(world_size=2, prepare=measure)
    assert ranks.wait() == [0, 0], ranks.output()
    line = next(line for line in ranks.output().splitlines() if line.startswith("benchmark: "))
    found = json.loads(line.removeprefix("benchmark: "))
    assert [(rank["rank"], rank["node"]) for rank in found["ranks"]] == [(0, "here"), (1, "here")]
    assert all(rank["teraflops"] > 0 for rank in found["ranks"])
    assert found["all_reduce"][-1]["gb_per_second"] > 0
    assert found["pairs"] == []
