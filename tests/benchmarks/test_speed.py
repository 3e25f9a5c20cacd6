"""What `benchmarks/speed` concludes from turns; and a loop, ours, that takes some on two ranks."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.harness import versions
from benchmarks.speed import __main__ as speed
from benchmarks.speed.loops import Case


def loop(name: str, *speeds: float) -> speed.LoopOnImages:
    """A loop with turns of so many images per second."""
    case = Case(model="small-cnn", image_size=64, batch_size=50, workers=1)
    samples = [{"images_per_second": each, "page_faults": 5.2} for each in speeds]
    return speed.LoopOnImages(loop=name, images=speed.JPEG, case=case, samples=samples, peak_bytes=2**20)


def test_turns_of_the_same_round_are_compared() -> None:
    """A slow machine slows both loops down: the ratio is 2, 1 and 4, whatever the round took."""
    ours, by_hand = speed.rows_of([loop("ours", 1000, 125, 2000), loop("hand-written", 500, 125, 500)])
    assert (ours["images_per_second"], ours["least"], ours["most"]) == (1000.0, 125.0, 2000.0)
    assert (ours["by_hand_written"], ours["least_ratio"], ours["most_ratio"]) == (2.0, 1.0, 4.0)
    assert (by_hand["by_hand_written"], ours["page_faults_a_step"], ours["mib"]) == (1.0, 5, 1)


def test_batches_that_a_worker_made_in_advance_are_not_timed() -> None:
    assert loop("ours").lead == 4


@pytest.mark.slow
def test_a_loop_on_two_ranks_takes_turns(tmp_path: Path) -> None:
    python = Path(sys.executable)
    options = speed.Options(rivals=python, loops=("ours",), seconds=0.1, turns=1, starts=1)
    loops = speed.loops_of(options, "small-cnn", speed.SYNTHETIC, tmp_path)
    speed.train(options, loops, tmp_path)
    [row] = speed.rows_of(loops)
    assert (row["images"], row["loop"]) == ("in memory", "ours")
    assert row["images_per_second"] > 0
    assert row["mib"] > 0
    assert versions(python, ["torch"]) == {"torch": version("torch")}
