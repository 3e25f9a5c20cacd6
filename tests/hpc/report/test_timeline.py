"""When a run did what, and its GPU-hours, from ledgers as submit, the agents and rank 0 write them."""

from typing import Any

import pandas as pd
import pytest
from report_rig import BEGAN, EVENTS, STEPS

from hpc.report.gather import TRAIN
from hpc.report.timeline import PARTS, Period, gpu_hours, periods_of
from hpc.status.downtime import interruptions_of

Event = dict[str, Any]
WHOLE = [
    ("queue", 0, 1, None), ("startup", 1, 10, None), ("training", 10, 130, None), ("recovery", 130, 140, 1),
    ("training", 140, 232, None), ("recovery", 232, 234, 2), ("queue", 234, 300, 2), ("recovery", 300, 310, 2),
    ("training", 310, 505, None),
]  # fmt: skip


def events_until(time: float, **changes: Any) -> list[Event]:
    """The events of the run of the other tests, which 2 nodes train; all claims with these changes."""
    return [
        {**event, **(changes if event["event"] == "claimed" else {}), "time": BEGAN + event["time"]}
        for event in EVENTS
        if event["time"] <= time
    ]


def periods(events: list[Event], until: float, *, own_script: bool = False) -> list[Period]:
    interruptions = [vars(one) for one in interruptions_of(events)]
    return periods_of(events, interruptions, BEGAN + until, own_script=own_script)


def short(found: list[Period]) -> list[tuple[str, float, float, int | None]]:
    return [(one.kind, one.began - BEGAN, one.ended - BEGAN, one.interruption) for one in found]


def gpu_seconds(events: list[Event], until: float, steps: int = STEPS, **settings: Any) -> dict[str, float]:
    """By part, of a training whose steps take 0.9 s each."""
    lines = [{"step": step, "train_seconds": 0.9 * step, "world_size": 2} for step in range(2, steps + 1, 2)]
    train = pd.DataFrame(lines, columns=list(TRAIN))
    hours = gpu_hours(events, periods(events, until), train, settings.get("gpus", 1), settings.get("lost", 2))
    return {part: round(3600 * value, 3) for part, value in hours.items()}


def test_periods_follow_each_other_from_the_submission_to_the_end() -> None:
    assert short(periods(events_until(505), 505)) == WHOLE


@pytest.mark.parametrize(
    ("until", "last"),
    [
        (0.5, ("queue", 0, 0.5, None)),
        (5, ("startup", 1, 5, None)),
        (50, ("training", 10, 50, None)),
        (135, ("recovery", 130, 135, 1)),
        (290, ("queue", 234, 290, 2)),
        (305, ("recovery", 300, 305, 2)),
    ],
)
def test_a_run_that_goes_on_is_in_its_last_period(until: float, last: tuple[str, float, float, int | None]) -> None:
    assert short(periods(events_until(until), until))[-1] == last


def test_a_script_of_the_users_own_has_no_startup() -> None:
    known = [event for event in events_until(505) if event["event"] not in {"train_started", "first_step"}]
    found = short(periods(known, 505, own_script=True))
    assert found[:2] == [("queue", 0, 1, None), ("training", 1, 130, None)]
    assert ("queue", 234, 300, 2) in found
    assert found[-1] == ("training", 300, 505, None)


def test_gpu_hours_by_part() -> None:
    found = gpu_seconds(events_until(505), 505)
    assert found == {
        "productive": 720.0, "recomputed": 3.6, "recovering": 44.0, "waiting": 18.0, "evaluating and saving": 90.4,
    }  # fmt: skip
    assert tuple(found) == PARTS
    assert sum(found.values()) == pytest.approx(2 * (233 + 205)), "both nodes, from each claim to its end"


def test_gpus_of_spares_wait() -> None:
    found, without = gpu_seconds(events_until(505, nodes=["a", "b", "c"]), 505), gpu_seconds(events_until(505), 505)
    assert found["waiting"] == pytest.approx(without["waiting"] + 9 + (120 + 92 + 195))
    assert found["recovering"] == pytest.approx(1.5 * without["recovering"])
    assert found["productive"] == without["productive"]


def test_waiting_in_the_queue_costs_nothing() -> None:
    assert gpu_seconds(events_until(0), 500, steps=0) == {}
    assert gpu_seconds(events_until(234), 234, steps=210) == gpu_seconds(events_until(234), 290, steps=210)
