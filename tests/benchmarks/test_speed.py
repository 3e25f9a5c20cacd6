"""What `benchmarks/speed` concludes from turns; and a loop, ours, that takes some on two ranks."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.speed import __main__ as speed
from benchmarks.speed.loops import Case
from benchmarks.speed.ranks import FirstStep, Turn


def contender(loop: str, *seconds: float) -> speed.Contender:
    """A loop with turns of ten steps that took so long."""
    case = Case(model="small-cnn", image_size=64, batch_size=50, workers=1)
    turns = [
        Turn(steps=10, seconds=each, wait_share=0.25, cpu_seconds=2 * each, page_faults=100 * number)
        for number, each in enumerate(seconds)
    ]
    first = [FirstStep(seconds=3.0, cpu_seconds=2.0)]
    return speed.Contender(loop=loop, images=speed.JPEG, case=case, first_steps=first, turns=turns, peak_bytes=2**20)


def test_turns_of_the_same_round_are_compared() -> None:
    """A slow machine slows both loops down: the ratio is 2, 1 and 4, whatever the round took."""
    ours, by_hand = speed.rows([contender("ours", 1.0, 8.0, 0.5), contender("hand-written", 2.0, 8.0, 2.0)])
    assert (ours["images_per_second"], ours["least"], ours["most"]) == (1000.0, 125.0, 2000.0)
    assert (ours["by_hand_written"], ours["least_ratio"], ours["most_ratio"]) == (2.0, 1.0, 4.0)
    assert (by_hand["by_hand_written"], by_hand["cpu_ms_per_image"]) == (1.0, 4.0)
    assert (ours["page_faults_a_step"], ours["waiting"], ours["mib"], ours["first_step_seconds"]) == (5, 0.25, 1, 3.0)
    [goal] = speed.goals([ours, by_hand])
    assert (goal["goal"], goal["value"], goal["met"]) == ("small-cnn, JPEG: ours by hand-written", 2.0, True)


def test_batches_that_a_worker_made_in_advance_are_not_timed() -> None:
    assert contender("ours").lead == 4


@pytest.mark.slow
def test_a_loop_on_two_ranks_takes_turns(tmp_path: Path) -> None:
    python = Path(sys.executable)
    options = speed.Options(rivals=python, loops=("ours",), seconds=0.1, rounds=1, starts=1)
    todo = speed.contenders(options, "small-cnn", speed.SYNTHETIC, tmp_path)
    speed.measure(options, todo, tmp_path)
    [row] = speed.rows(todo)
    assert (row["images"], row["loop"]) == ("in memory", "ours")
    assert row["images_per_second"] > 0
    assert row["mib"] > 0
    assert speed.versions(python)["torch"] == version("torch")
