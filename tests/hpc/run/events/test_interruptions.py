"""What interruptions cost, from ledgers as the agents and rank 0 write them."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.events import (
    attempt_ended,
    claimed,
    event,
    first_step,
    interruption,
    ranks_started,
    resubmitted,
    resumed,
    staged,
    submitted,
    train_started,
    train_stopped,
    write_events,
)

from hpc.base.files import append_json_line
from hpc.run.events.history import History
from hpc.run.events.interruptions import PARTS, Interruption, goodput, interruptions_of, waits_of
from hpc.run.events.kinds import Event
from hpc.run.rundir import RunDir
from hpc.status.run_view import summarize


def interruptions(directory: Path, *events: Event) -> list[Interruption]:
    """The interruptions in these events, written by two writers."""
    for number in (0, 1):
        write_events(RunDir(directory), *events[number::2], file=f"writer-{number}.jsonl")
    return interruptions_of(History.load(RunDir(directory)))


def began(at: float, attempt: int = 1) -> Event:
    return claimed(at, attempt, restart=attempt - 1, nodes=("a", "b"))


def started(at: float, step: int, attempt: int = 1) -> Event:
    """Rank 0, 5 s after its process began, of which it took 3 to meet the others."""
    return train_started(at, step, attempt=attempt, world_size=4, seconds=5.0, connect_seconds=3.0)


def seconds(**parts: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(PARTS, 0.0), **parts}


FIRST = (began(1.0), staged(2.0, node="a"), started(10.0, step=0), first_step(11.0, 1))


def test_worker_that_was_restarted_in_place(tmp_path: Path) -> None:
    (found,) = interruptions(
        tmp_path,
        *FIRST,
        interruption(31.0, step=57, rank=3, node="b", detail="KeyError: 1", failed_at=30.5, round=1),
        started(40.0, step=55),
        first_step(41.5, 56),
    )
    assert (found.cause, found.attempt, found.step, found.failed_at) == ("crashed", 1, 57, 30.5)
    assert (found.rank, found.node, found.detail) == (3, "b", "KeyError: 1")
    assert found.steps_lost == 2
    assert found.seconds == seconds(notice=0.5, rendezvous=7.0, restore=2.0, first_step=1.5, total=11.0)


def test_worker_that_trained_again_before_its_failure_was_recorded(tmp_path: Path) -> None:
    again = replace(started(30.9, step=55), seconds=0.3, connect_seconds=0.2)
    crash = interruption(31.6, step=57, rank=3, failed_at=30.5, round=1)
    [found] = interruptions(tmp_path, *FIRST, again, first_step(31.0, 56), crash)
    assert found.steps_lost == 2
    assert found.seconds == seconds(notice=0.3, restore=0.1, first_step=0.1, total=0.5)
    [attempt] = History.load(RunDir(tmp_path)).attempts
    assert attempt.restored_step == 55, "the ranks that run now have this step"
    assert attempt.interruptions[0].restored_step == 0


@pytest.mark.parametrize("reports", [True, False])
def test_script_without_state_trains_again_when_its_ranks_have_started(tmp_path: Path, reports: bool) -> None:
    crash = interruption(31.0, step=None, failed_at=30.5, round=1)
    steps = (first_step(43.0, 1),) if reports else ()
    [found] = interruptions(tmp_path, began(1.0), ranks_started(5.0), crash, ranks_started(41.0), *steps)
    first, total = (2.0, 12.5) if reports else (None, 10.5)
    assert found.seconds == seconds(notice=0.5, rendezvous=10.0, first_step=first, total=total)
    assert found.steps_lost is None


def test_preempted_attempt_that_was_requeued(tmp_path: Path) -> None:
    (found,) = interruptions(
        tmp_path,
        *FIRST,
        train_stopped(33.0, 60, seconds=2.0),
        attempt_ended(34.0, "preempted", step=60),
        event("requeued", 35.0, attempt=1, job_id="7"),
        began(155.0, attempt=2),
        staged(156.0, 2, node="a"),
        staged(158.0, 2, node="b"),
        started(166.0, step=60, attempt=2),
        first_step(167.0, 61, attempt=2),
    )
    assert found.failed_at == 31.0, "the stop signal"
    assert found.steps_lost == 0
    assert found.seconds == seconds(
        notice=3.0, release=1.0, start=120.0, stage=3.0, rendezvous=6.0, restore=2.0, first_step=1.0, total=136.0
    )


def test_pause_until_the_user_resumes_is_no_recovery(tmp_path: Path) -> None:
    (found,) = interruptions(
        tmp_path,
        *FIRST,
        attempt_ended(34.0, "cancelled", step=60),
        resumed(9034.0, cancellations=1),
        resubmitted(9035.0),
        began(9040.0, attempt=2),
        staged(9041.0, 2, node="a"),
        started(9050.0, step=60, attempt=2),
        first_step(9051.0, 61, attempt=2),
    )
    assert (found.cause, found.steps_lost) == ("cancelled", 0)
    assert found.seconds["total"] == 17.0


def test_attempt_that_ended_without_reporting_is_noticed_by_the_next(tmp_path: Path) -> None:
    (found,) = interruptions(
        tmp_path,
        *FIRST,
        began(330.0, attempt=2),
        attempt_ended(330.1, "node_failure", step=60, last_heard=29.0, detail="down: b"),
        started(340.0, step=40, attempt=2),
    )
    assert found.steps_lost == 20
    assert found.seconds == seconds(notice=301.0, rendezvous=8.0, restore=2.0, first_step=None, total=311.0), (
        "no record of the first step: until the training started"
    )


def test_second_failure_before_the_ranks_are_back_has_the_steps_of_both(tmp_path: Path) -> None:
    first, second = interruptions(
        tmp_path,
        *FIRST,
        interruption(31.0, step=57, failed_at=31.0, round=1),
        interruption(35.0, "bad_node", step=None, failed_at=35.0, round=1),
        started(45.0, step=50),
    )
    assert (first.steps_lost, first.seconds["total"]) == (None, None)
    assert (second.steps_lost, second.seconds["total"]) == (7, 10.0)


def test_interruption_that_ended_the_attempt_after_all_is_one(tmp_path: Path) -> None:
    """A node is lost, and too few are left to go on without it."""
    (found,) = interruptions(
        tmp_path,
        *FIRST,
        interruption(31.0, "node_failure", step=57, node="b", failed_at=30.0, round=1),
        attempt_ended(33.0, "node_failure", step=57, node="b", failed_at=30.0),
        began(40.0, attempt=2),
        started(50.0, step=50, attempt=2),
    )
    assert (found.steps_lost, found.seconds["notice"], found.seconds["total"]) == (7, 3.0, 20.0)


@pytest.mark.parametrize(
    ("cause", "interrupted"),
    [("crashed", True), ("preempted", True), ("bad_input", False), ("cancelled", False), ("completed", False)],
)
def test_last_end_is_an_interruption_if_the_run_should_go_on(tmp_path: Path, cause: str, interrupted: bool) -> None:
    found = interruptions(tmp_path, *FIRST, attempt_ended(40.0, cause, step=60, failed_at=39.0))
    assert [interruption.cause for interruption in found] == [cause] * interrupted


def test_summary_has_the_interruptions(tmp_path: Path) -> None:
    assert goodput(None, 0.0, 10.0) is None, "the time is not recorded"
    run = RunDir(tmp_path)
    run.train_metrics.parent.mkdir()
    write_events(run, *FIRST)
    assert summarize(run, None).steps_lost == 0, "there is none yet"
    write_events(
        run,
        interruption(31.0, step=57, failed_at=30.0),
        event("rendezvous", 32.0, attempt=1, round=2, port=1, members=[1]),
        started(40.0, step=55),
        attempt_ended(81.0, step=90),
    )
    append_json_line(run.train_metrics, {"step": 90, "epoch": 1, "time": 80.0, "train_seconds": 60.0})
    summary = json.loads(json.dumps(summarize(run, None).document()))
    assert (summary["state"], summary["steps_lost"], summary["goodput"]) == ("completed", 2, 0.75)
    assert [interruption["cause"] for interruption in summary["interruptions"]] == ["crashed"]
    assert (summary["attempts"][0]["nodes"], summary["attempts"][0]["members"]) == (["a", "b"], ["b"])


def test_waits_are_for_an_attempt_that_somebody_wants() -> None:
    events = [submitted(0.0), began(4.0), attempt_ended(20.0, "preempted"), began(30.0, 2)]
    assert waits_of(History([]), 9.0) == [(9.0, 9.0)]
    assert waits_of(History(events[:1]), 9.0) == [(0.0, 9.0)]
    assert waits_of(History(events), 50.0) == [(0.0, 4.0), (20.0, 30.0), (50.0, 50.0)]
    events += [attempt_ended(60.0, "cancelled", attempt=2), resumed(90.0, attempt=2)]
    assert waits_of(History(events), 95.0)[2:] == [(90.0, 95.0)], "the user did not want it for half a minute"
