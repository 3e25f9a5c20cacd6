"""The sizes of a scaling study, and the efficiency of their ranks."""

import pytest

from hpc.base.errors import UserError
from hpc.studies.scaling_study import Measures, Mode, ScalingSpec, read_gpus, read_nodes, split_sizes, with_efficiency


@pytest.mark.parametrize(
    "arguments", [("--nodes", "1", "2", "4"), ("--nodes=1,2,4",), ("-N", "1", "2", "4"), ("--nodes=1", "2", "4")]
)
def test_nodes_may_be_several_words(arguments: tuple[str, ...]) -> None:
    nodes, gpus, others = split_sizes([*arguments, "--lr", "0.1", "--gpus_per_node", "a100:1", "a100:4", "--json"])
    assert (read_nodes(nodes), read_gpus(gpus), others) == ((1, 2, 4), ("a100", (1, 4)), ["--lr", "0.1", "--json"])


def test_wrong_sizes_are_refused() -> None:
    for wrong in (["0"], ["two"], ["1", "1"], ["1:2"]):
        with pytest.raises(UserError, match="--nodes is"):
            read_nodes(wrong)
    for wrong in (["a100:1", "h100:4"], ["x"], ["2", "2"]):
        with pytest.raises(UserError, match="--gpus-per-node is"):
            read_gpus(wrong)


def study(mode: Mode) -> ScalingSpec:
    return ScalingSpec(
        nodes=(2, 1), gpus=(1, 4), gpu_type=None, minutes=3.0, mode=mode, parallel=1, settings={}, script=(),
        revision=None,
    )  # fmt: skip


def test_batch_grows_with_the_ranks_or_stays() -> None:
    weak, strong = study("weak"), study("strong")
    assert [size.name for size in weak.sizes] == ["1x1", "2x1", "1x4", "2x4"]
    assert [weak.growth(size) for size in weak.sizes] == [1, 2, 4, 8]
    assert {strong.growth(size) for size in strong.sizes} == {1}


def measured(nodes: int, gpus: int, speed: float | None) -> Measures:
    return Measures(size=f"{nodes}x{gpus}", ranks=nodes * gpus, state="completed", speed=speed)


def test_efficiency_is_the_speed_of_a_rank_compared_with_the_smallest_size() -> None:
    sizes = [measured(1, 1, 100), measured(2, 1, 180), measured(4, 1, 200), measured(8, 1, None)]
    assert [one.efficiency for one in with_efficiency(sizes)] == [1.0, 0.9, 0.5, None]
