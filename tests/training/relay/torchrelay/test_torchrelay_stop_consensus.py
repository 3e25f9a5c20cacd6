"""How often the ranks exchange flags, and when what one of them requests takes effect."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from torch import distributed
from torchrelay import stop_consensus
from torchrelay.stop_consensus import StepFlags, StopConsensus

from training.runtime.process_group import ProcessGroup


class Clock:
    """A clock that a test moves on, exactly: sums of floats would round the interval down at some times."""

    seconds = Fraction(0)

    @classmethod
    def monotonic(cls) -> Fraction:
        return cls.seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_consensus, "time", Clock)


def exchanges(consensus: StopConsensus, step_seconds: float, steps: int, most: float = math.inf) -> list[int]:
    """The steps at whose boundary flags are exchanged."""
    found = []
    Clock.seconds += Fraction(str(step_seconds))
    for step in range(steps):
        if consensus.is_due():
            consensus.exchange(StepFlags(), most)
            found.append(step)
        Clock.seconds += Fraction(str(step_seconds))
    return found


@pytest.mark.parametrize(
    ("step_ms", "most", "every"), [(100, 10, 1), (30, 10, 1), (10, 10, 5), (1, 10, 5), (1, 3, 3), (1, 0, 1)]
)
def test_flags_are_exchanged_about_every_50_ms(group: ProcessGroup, step_ms: int, most: int, every: int) -> None:
    steps = exchanges(StopConsensus(group.control), step_ms / 1000, 40, most)
    assert steps[:2] == [0, 1], "what the first one agrees on is known at the second"
    assert {later - earlier for earlier, later in pairwise(steps[1:])} == {every}


def test_where_steps_become_slow_flags_are_exchanged_at_each_again(group: ProcessGroup) -> None:
    consensus = StopConsensus(group.control)
    exchanges(consensus, 0.001, 30)
    steps = exchanges(consensus, 1.0, 40)
    assert steps[-5:] == [35, 36, 37, 38, 39]
    assert steps[2] < 30, "within two intervals"


def test_ranks_other_than_0_leave_the_interval_to_it(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    consensus = StopConsensus(group.control)
    assert exchanges(consensus, 0.001, 4) == [0, 1, 2, 3], "nobody has set it"
    consensus.wait()


def test_other_requests_are_agreed_on_with_a_save(group: ProcessGroup) -> None:
    consensus = StopConsensus(group.control)
    wanted = StepFlags(snapshot=1, end=1)
    assert consensus.exchange(wanted) == StepFlags(), "nothing is agreed on yet"
    assert consensus.exchange(wanted) == wanted._replace(interval=1)
    assert consensus.exchange(StepFlags()) == StepFlags(interval=1), "not twice"
    assert consensus.wait() == StepFlags(interval=1)
    assert consensus.wait() == StepFlags(), "nothing is pending"
