"""What `benchmarks/restart` concludes; and one restart, of one rank."""

import pytest
from support.real_images import needs_fashion_mnist

from benchmarks.restart import __main__ as restart

CASE = restart.Case(kind="forked", model="small-cnn", ranks=1)


def test_a_restart_ends_when_the_last_rank_has_made_a_step() -> None:
    found = [
        {"event": "start", "rank": 0, "time": 104.0, "began": 102.0, "imported": 103.5},
        {"event": "start", "rank": 1, "time": 106.0, "began": 103.0, "imported": 105.0},
        {"event": "first_step", "rank": 1, "time": 106.0},
        {"event": "first_step", "rank": 0, "time": 107.0},
        {"event": "step", "time": 108.0},
    ]
    parts = restart.parts_of(found, killed_at=100.0)
    assert parts == {"import": 2.0, "total": 7.0}
    row = restart.row(CASE, [parts, {}])
    assert (row["total, s"], row["least, s"], row["restarts"], row["hung"]) == (7.0, 7.0, 1, 1)


@pytest.mark.slow
@needs_fashion_mnist
def test_a_killed_rank_makes_a_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_SECONDS_BETWEEN_KILLS", 0.0)
    [parts] = restart.restart(CASE, kills=1)
    assert 0 < parts["import"] < parts["total"]
