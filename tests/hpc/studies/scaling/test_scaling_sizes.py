"""The sizes of a scaling study, and what follows from its measurements."""

from pathlib import Path

import pytest

from hpc.base.errors import UserError
from hpc.studies.scaling.measures import Measures, conclusions, efficiency
from hpc.studies.scaling.scaling_dir import ScalingDir, ScalingSpec, Size, read_gpus, read_nodes, split_sizes
from hpc.studies.scaling.scaling_result import show


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


def study(**changes: object) -> ScalingSpec:
    values = {
        "nodes": (2, 1), "gpus": (1, 4), "gpu_type": None, "minutes": 3.0, "mode": "weak", "batch_size": 64,
        "parallel": 1, "settings": {}, "script": (), "revision": None,
    }  # fmt: skip
    return ScalingSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_batch_grows_with_the_ranks_or_stays() -> None:
    assert [size.name for size in study().sizes] == ["1x1", "2x1", "1x4", "2x4"]
    weak, strong = ([spec.settings_of(size) for size in spec.sizes] for spec in (study(), study(mode="strong")))
    assert [settings["batch-size"] for settings in weak] == [64, 128, 256, 512]
    assert weak[3] == {"nodes": 2, "gpus-per-node": 4, "batch-size": 512, "max-hours": 0.05}
    assert {settings["batch-size"] for settings in strong} == {64}


def measured(nodes: int, gpus: int, speed: float | None, **more: float) -> Measures:
    return Measures(size=Size(nodes=nodes, gpus=gpus), run="x", state="completed", speed=speed, **more)  # type: ignore[arg-type]


def test_conclusions_name_the_limit_and_its_reason() -> None:
    wait = {"allreduce_wait_share": 0.6, "allreduce_seconds": 0.5, "gradient_bytes": 10**8, "data_wait_share": 0.1}
    sizes = [measured(1, 1, 100), measured(2, 1, 180), measured(4, 1, 200, **wait), measured(8, 1, None)]
    assert list(efficiency(sizes).values()) == [1.0, 0.9, 0.5]
    assert sizes[2].bandwidth == 2 * 3 / 4 * 100e6 / 0.5
    first, second = conclusions(sizes)
    assert first == "More ranks pay up to 2 ranks (2x1): 4 ranks (4x1) are 1.11 times as fast, not 2 times."
    assert second.startswith(
        "They wait 60% of the time for the all-reduce of 100 MB of gradients a step (0.5 s, at least 300 MB/s)"
    )


@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("running", 0)])
def test_without_a_measured_speed_an_ended_study_has_failed(
    state: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [Measures(size=Size(nodes=nodes, gpus=1), run="x", state=state, cause="exit code 3") for nodes in (1, 2)]
    assert show(ScalingDir(tmp_path / "own"), study(), sizes, as_json=False) == code
    printed = capsys.readouterr()
    assert f"2x1 is {state}: exit code 3" in printed.out
    assert ("no run has a measured speed: each must train" in printed.err) == bool(code)
