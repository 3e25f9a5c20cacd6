"""The sizes of a scaling study, and what follows from its measurements."""

import pytest

from hpc.base.errors import UserError
from hpc.studies.scaling_measures import Measures, conclusions, with_efficiency
from hpc.studies.scaling_study import Mode, ScalingSpec, read_gpus, read_nodes, split_sizes


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


def measured(nodes: int, gpus: int, speed: float | None, **more: float) -> Measures:
    return Measures(size=f"{nodes}x{gpus}", ranks=nodes * gpus, state="completed", speed=speed, **more)  # type: ignore[arg-type]


def said(*sizes: Measures) -> list[str]:
    return conclusions(with_efficiency(sizes))


def test_conclusions_name_the_limit_and_its_reason() -> None:
    wait = {"allreduce_wait_share": 0.6, "data_wait_share": 0.1}
    sizes = [measured(1, 1, 100), measured(2, 1, 180), measured(4, 1, 200, **wait), measured(8, 1, None)]
    assert [one.efficiency for one in with_efficiency(sizes)] == [1.0, 0.9, 0.5, None]
    first, second = said(*sizes)
    assert first == "More ranks pay up to 2 ranks (2x1): 4 ranks (4x1) are 1.11 times as fast, not 2 times."
    assert second.startswith("They wait 60% of the time for the all-reduce. What helps: more images per rank")
    [_, reason] = said(measured(1, 1, 100), measured(2, 1, 110, data_wait_share=0.4))
    assert reason.startswith("They wait 40% of the time for data")


def test_conclusions_call_slower_what_is_slower_and_compare_the_fastest_sizes() -> None:
    assert said(measured(1, 1, 100), measured(1, 2, 20), measured(2, 1, 23)) == [
        "More ranks pay up to 1 rank (1x1): 2 ranks (2x1) are slower, at 23% of that speed."
    ]
    assert said(measured(1, 1, 100), measured(1, 2, 190), measured(2, 1, 160)) == [
        "More ranks pay up to the largest size, 2 ranks (1x2): each rank has 95% of its speed in the smallest size."
    ]
    assert said(measured(1, 1, 100)) == []
