"""What `benchmarks/speed` concludes from turns; and a loop, ours, that takes some on two ranks."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.harness import Sample, versions
from benchmarks.speed import __main__ as speed
from benchmarks.speed.loops import Case


def turns(name: str, *speeds: float) -> tuple[speed.LoopOnImages, list[Sample]]:
    """A loop, and its turns of so many images per second."""
    case = Case(model="small-cnn", image_size=64, batch_size=50, workers=1)
    samples = [{"images_per_second": each, "page_faults": 5.2, "mib": 1.0} for each in speeds]
    return speed.LoopOnImages(loop=name, images=speed.JPEG, case=case), list(samples)


def test_turns_of_the_same_round_are_compared() -> None:
    """A slow machine slows both loops down: the ratio is 2, 1 and 4, whatever the round took."""
    found = dict([turns("ours", 1000, 125, 2000), turns("hand-written", 500, 125, 500)])
    ours, by_hand = speed.rows_of(found)
    assert (ours["images_per_second"], ours["least"], ours["most"]) == (1000.0, 125.0, 2000.0)
    assert (ours["by_hand_written"], by_hand["by_hand_written"]) == (2.0, 1.0)
    assert (ours["page_faults_a_step"], ours["mib"]) == (5, 1)


@pytest.mark.slow
def test_a_loop_on_two_ranks_takes_turns(tmp_path: Path) -> None:
    python = Path(sys.executable)
    options = speed.Options(rivals=python, loops=("ours",), seconds=0.1, turns=1)
    [row] = speed.train(options, speed.loops_of(options, "small-cnn", speed.SYNTHETIC, tmp_path))
    assert (row["images"], row["loop"]) == ("in memory", "ours")
    assert row["images_per_second"] > 0
    assert row["mib"] > 0
    assert versions(python, ["torch"]) == {"torch": version("torch")}
