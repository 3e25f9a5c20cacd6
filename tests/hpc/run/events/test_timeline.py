"""When a run did what, and its GPU-hours, from ledgers as submit, the agents and rank 0 write them."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.events import (
    attempt_ended,
    claimed,
    first_step,
    interruption,
    submitted,
    train_started,
)

from hpc.run.events.downtime import interruptions_of
from hpc.run.events.history import History
from hpc.run.events.kinds import Claimed, Event, FirstStep, TrainStarted
from hpc.run.events.timeline import GPU_PARTS, Period, gpu_hours, periods_of

STEPS = 400
# On two nodes with a rank each: attempt 1 crashes at step 120 and goes on, is preempted at 210; attempt 2 completes.
EVENTS: tuple[Event, ...] = (
    submitted(0.0),
    claimed(1.0, nodes=("a1", "a2")),
    train_started(9.0, world_size=2, train_seconds=0.0),
    first_step(10.0),
    interruption(131.0, step=120, failed_at=130.0),
    train_started(139.0, 118, world_size=2, train_seconds=106.2),
    first_step(140.0, 119),
    attempt_ended(234.0, "preempted", step=210, failed_at=232.0),
    claimed(300.0, 2, restart=1, nodes=("a", "b")),
    train_started(309.0, 210, attempt=2, world_size=2, train_seconds=189.0),
    first_step(310.0, 211, attempt=2),
    attempt_ended(505.0, attempt=2, step=STEPS),
)
ALL_PERIODS = [
    ("queue", 0, 1, None), ("startup", 1, 10, None), ("training", 10, 130, None), ("recovery", 130, 140, 1),
    ("training", 140, 232, None), ("recovery", 232, 234, 2), ("queue", 234, 300, 2), ("recovery", 300, 310, 2),
    ("training", 310, 505, None),
]  # fmt: skip


def events_until(time: float, **changes: Any) -> list[Event]:
    """The events up to a time; all claims with these changes."""
    return [replace(one, **(changes if isinstance(one, Claimed) else {})) for one in EVENTS if one.time <= time]


def periods(events: Sequence[Event], until: float, *, own_script: bool = False) -> list[Period]:
    history = History(events)
    return periods_of(history, interruptions_of(history), until, own_script=own_script)


def short(found: list[Period]) -> list[tuple[str, float, float, int | None]]:
    return [(one.kind, one.began, one.ended, one.interruption) for one in found]


def gpu_seconds(events: list[Event], until: float, steps: int = STEPS, **line: Any) -> dict[str, float]:
    """By part, of a training on a GPU per node whose steps take 0.9 s each."""
    last_logged = {"step": steps, "train_seconds": 0.9 * steps, **line} if steps else {}
    hours = gpu_hours(History(events), periods(events, until), 1, last_logged, steps_lost=2)
    return {part: round(3600 * value, 3) for part, value in hours.items()}


def test_periods_follow_each_other_from_the_submission_to_the_end() -> None:
    assert short(periods(events_until(505), 505)) == ALL_PERIODS


@pytest.mark.parametrize(
    ("until", "last"),
    [
        (5, ("startup", 1, 5, None)),
        (135, ("recovery", 130, 135, 1)),
        (290, ("queue", 234, 290, 2)),
    ],
)
def test_a_run_that_goes_on_is_in_its_last_period(until: float, last: tuple[str, float, float, int | None]) -> None:
    assert short(periods(events_until(until), until))[-1] == last


def test_a_script_of_the_users_own_has_no_startup() -> None:
    known = [event for event in events_until(505) if not isinstance(event, TrainStarted | FirstStep)]
    found = short(periods(known, 505, own_script=True))
    assert found[:2] == [("queue", 0, 1, None), ("training", 1, 130, None)]
    assert ("queue", 234, 300, 2) in found
    assert found[-1] == ("training", 300, 505, None)


def test_gpu_hours_by_part() -> None:
    found = gpu_seconds(events_until(505), 505)
    assert found == {
        "productive": 720.0, "recomputed": 3.6, "recovering": 44.0, "waiting": 18.0, "evaluating and saving": 90.4,
    }  # fmt: skip
    assert tuple(found) == GPU_PARTS[:-1], "nothing is unknown"
    assert sum(found.values()) == pytest.approx(2 * (233 + 205)), "both nodes, from each claim to its end"


def test_gpus_of_spares_wait() -> None:
    found, without = gpu_seconds(events_until(505, nodes=("a", "b", "c")), 505), gpu_seconds(events_until(505), 505)
    assert found["waiting"] == pytest.approx(without["waiting"] + 9 + (120 + 92 + 195))
    assert found["recovering"] == pytest.approx(1.5 * without["recovering"])
    assert found["productive"] == without["productive"]


def test_steps_on_fewer_ranks_count_for_fewer_gpus() -> None:
    events = [replace(one, world_size=1) if isinstance(one, TrainStarted) and one.step else one for one in EVENTS]
    assert gpu_seconds(events, 505)["productive"] == pytest.approx(2 * 106.2 + (360 - 106.2))


def test_fork_does_not_count_the_steps_of_its_original() -> None:
    events = [
        replace(one, step=one.step + 1000, train_seconds=one.train_seconds + 900.0)
        if isinstance(one, TrainStarted)
        else one
        for one in EVENTS
    ]
    found = gpu_seconds(events, 505, steps=1000 + STEPS)
    assert (found["productive"], found["recomputed"]) == (720.0, 3.6)


@pytest.mark.parametrize(
    ("lost", "parts"), [(None, {"unknown": 832.0}), (0, {"productive": 832.0}), (100, {"productive": 665.6})]
)
def test_gpus_of_a_script_are_productive_as_far_as_its_lost_steps_are_known(
    lost: int | None, parts: dict[str, float]
) -> None:
    hours = gpu_hours(History(EVENTS), periods(EVENTS, 505, own_script=True), 1, {"step": 400}, steps_lost=lost)
    found = {part: round(3600 * value, 1) for part, value in hours.items() if part in {"productive", "unknown"}}
    assert found == parts
