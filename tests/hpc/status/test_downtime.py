"""What interruptions cost, from ledgers as the agents and rank 0 write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc.core import ledger
from hpc.core.attempts import attempts_of
from hpc.core.files import append_json_line
from hpc.core.rundir import RunDir
from hpc.status.downtime import PARTS, Interruption, goodput, interruptions_of, recovery_by_cause
from hpc.status.run_view import summarize


def interruptions(directory: Path, *events: dict[str, Any]) -> list[Interruption]:
    """The interruptions in these events, written by two writers."""
    for number, event in enumerate(events):
        append_json_line(directory / f"writer-{number % 2}.jsonl", event)
    return interruptions_of(ledger.read(directory))


def happened(time: float, event: str, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "attempt": attempt, **fields}


def claimed(time: float, attempt: int = 1) -> dict[str, Any]:
    return happened(time, "claimed", attempt, job_id="7", restart=attempt - 1, secret="aa", nodes=["a", "b"])


def started(time: float, step: int, attempt: int = 1) -> dict[str, Any]:
    """Rank 0, 5 s after its process began, of which it took 3 to meet the others."""
    return happened(time, "train_started", attempt, step=step, world_size=4, seconds=5.0, connect_seconds=3.0)


def seconds(**parts: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(PARTS, 0.0), **parts}


FIRST = (
    claimed(1.0),
    happened(2.0, "staged", node="a", source="/d"),
    started(10.0, step=0),
    happened(11.0, "first_step", step=1),
)


def test_run_without_interruption_has_none(tmp_path: Path) -> None:
    assert interruptions(tmp_path, *FIRST, happened(50.0, "attempt_ended", cause="completed", step=90)) == []


def test_worker_that_was_restarted_in_place(tmp_path: Path) -> None:
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        happened(
            31.0,
            "interruption",
            cause="crashed",
            step=57,
            rank=3,
            node="b",
            detail="KeyError: 1",
            failed_at=30.5,
            round=1,
        ),
        started(40.0, step=55),
        happened(41.5, "first_step", step=56),
    )
    assert (interruption.cause, interruption.attempt, interruption.step, interruption.failed_at) == (
        "crashed",
        1,
        57,
        30.5,
    )
    assert (interruption.rank, interruption.node, interruption.detail) == (3, "b", "KeyError: 1")
    assert interruption.steps_lost == 2
    assert interruption.seconds == seconds(notice=0.5, rendezvous=7.0, restore=2.0, first_step=1.5, total=11.0)


def test_worker_that_trained_again_before_its_failure_was_recorded(tmp_path: Path) -> None:
    again = {**started(30.9, step=55), "seconds": 0.3, "connect_seconds": 0.2}
    crash = happened(31.6, "interruption", cause="crashed", step=57, rank=3, failed_at=30.5, round=1)
    [interruption] = interruptions(tmp_path, *FIRST, again, happened(31.0, "first_step", step=56), crash)
    assert interruption.steps_lost == 2
    assert interruption.seconds == seconds(notice=0.3, restore=0.1, first_step=0.1, total=0.5)
    [attempt] = attempts_of(ledger.read(tmp_path))
    assert attempt.restored_step == 55, "the ranks that run now have this step"
    assert attempt.interruptions[0].restored_step == 0


def test_preempted_attempt_that_was_requeued(tmp_path: Path) -> None:
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        happened(33.0, "train_stopped", step=60, signal="SIGTERM", seconds=2.0),
        happened(34.0, "attempt_ended", cause="preempted", step=60),
        happened(35.0, "requeued", job_id="7"),
        claimed(155.0, attempt=2),
        happened(156.0, "staged", 2, node="a", source="/d"),
        happened(158.0, "staged", 2, node="b", source="/d"),
        started(166.0, step=60, attempt=2),
        happened(167.0, "first_step", 2, step=61),
    )
    assert interruption.failed_at == 31.0, "the stop signal"
    assert interruption.steps_lost == 0
    assert interruption.seconds == seconds(
        notice=3.0, release=1.0, start=120.0, stage=3.0, rendezvous=6.0, restore=2.0, first_step=1.0, total=136.0
    )


def test_pause_until_the_user_resumes_is_no_recovery(tmp_path: Path) -> None:
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        happened(34.0, "attempt_ended", cause="cancelled", step=60),
        happened(9034.0, "resumed", number=1, cancellations=1),
        happened(9035.0, "resubmitted", job_id="8", excluded=[]),
        claimed(9040.0, attempt=2),
        happened(9041.0, "staged", 2, node="a", source="/d"),
        started(9050.0, step=60, attempt=2),
        happened(9051.0, "first_step", 2, step=61),
    )
    assert (interruption.cause, interruption.steps_lost) == ("cancelled", 0)
    assert interruption.seconds["total"] == 17.0


def test_attempt_that_ended_without_reporting_is_noticed_by_the_next(tmp_path: Path) -> None:
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        claimed(330.0, attempt=2),
        happened(330.1, "attempt_ended", cause="node_failure", step=60, last_heard=29.0, detail="down: b"),
        started(340.0, step=40, attempt=2),
    )
    assert interruption.steps_lost == 20
    assert interruption.seconds == seconds(notice=301.0, rendezvous=8.0, restore=2.0, first_step=None, total=311.0), (
        "no record of the first step: until the training started"
    )


def test_lost_node_failed_when_it_was_last_heard_of(tmp_path: Path) -> None:
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        happened(35.0, "node_lost", node="b", last_heard=31.0, detail="no word for 4 s"),
        happened(35.2, "interruption", cause="node_failure", step=60, failed_at=None, round=1),
    )
    assert (interruption.failed_at, interruption.node) == (31.0, "b")
    assert interruption.seconds["notice"] == pytest.approx(4.2)
    assert interruption.seconds["total"] is None, "the ranks have not started yet"


def test_second_failure_before_the_ranks_are_back_has_the_steps_of_both(tmp_path: Path) -> None:
    first, second = interruptions(
        tmp_path,
        *FIRST,
        happened(31.0, "interruption", cause="crashed", step=57, failed_at=31.0, round=1),
        happened(35.0, "interruption", cause="bad_node", step=None, failed_at=35.0, round=1),
        started(45.0, step=50),
    )
    assert (first.steps_lost, first.seconds["total"]) == (None, None)
    assert (second.steps_lost, second.seconds["total"]) == (7, 10.0)


def test_interruption_that_ended_the_attempt_after_all_is_one(tmp_path: Path) -> None:
    """A node is lost, and too few are left to go on without it."""
    (interruption,) = interruptions(
        tmp_path,
        *FIRST,
        happened(31.0, "interruption", cause="node_failure", step=57, node="b", failed_at=30.0, round=1),
        happened(33.0, "attempt_ended", cause="node_failure", step=57, node="b", failed_at=30.0),
        claimed(40.0, attempt=2),
        started(50.0, step=50, attempt=2),
    )
    assert (interruption.steps_lost, interruption.seconds["notice"], interruption.seconds["total"]) == (7, 3.0, 20.0)


@pytest.mark.parametrize(
    ("cause", "interrupted"),
    [("crashed", True), ("preempted", True), ("bad_input", False), ("cancelled", False), ("completed", False)],
)
def test_last_end_is_an_interruption_if_the_run_should_go_on(tmp_path: Path, cause: str, interrupted: bool) -> None:
    found = interruptions(tmp_path, *FIRST, happened(40.0, "attempt_ended", cause=cause, step=60, failed_at=39.0))
    assert [interruption.cause for interruption in found] == [cause] * interrupted


def test_end_after_too_many_failures_is_none(tmp_path: Path) -> None:
    failure = {"cause": "crashed", "step": 60, "signature": "1: KeyError"}
    found = interruptions(
        tmp_path,
        *FIRST,
        happened(40.0, "interruption", failed_at=39.0, **failure),
        started(45.0, step=60),
        happened(46.0, "attempt_ended", failed_at=45.0, **failure),
    )
    assert [interruption.recorded_at for interruption in found] == [40.0]


def test_recovery_by_cause(tmp_path: Path) -> None:
    found = interruptions(
        tmp_path,
        *FIRST,
        happened(30.0, "interruption", cause="crashed", step=20, failed_at=30.0),
        started(40.0, step=19),
        happened(50.0, "interruption", cause="crashed", step=30, failed_at=50.0),
        started(70.0, step=25),
        happened(80.0, "interruption", cause="hang", step=40, failed_at=80.0),
    )
    assert recovery_by_cause(found) == {
        "crashed": {"count": 2, "median_seconds": 15.0, "steps_lost": 6},
        "hang": {"count": 1, "median_seconds": None, "steps_lost": None},
    }


def test_goodput_is_unknown_where_the_time_is_not_recorded() -> None:
    assert goodput(None, 0.0, 10.0) is None
    assert goodput(6.0, 2.0, 10.0) == 0.75


def test_steps_that_a_script_lost_are_unknown(tmp_path: Path) -> None:
    """It reports none; how many it repeats is its own affair."""
    run = RunDir(tmp_path)
    run.events.mkdir()
    for event in (
        claimed(1.0),
        happened(31.0, "interruption", cause="crashed", step=None, failed_at=30.0),
        happened(40.0, "attempt_ended", cause="preempted", step=None),
        claimed(50.0, attempt=2),
        happened(90.0, "attempt_ended", 2, cause="completed", step=None),
    ):
        append_json_line(run.events / "x.jsonl", event)
    summary = summarize(run, None)
    assert (len(summary["interruptions"]), summary["steps_lost"]) == (2, None)
    assert [cost["steps_lost"] for cost in summary["recovery"].values()] == [None, None]


def test_run_without_interruption_lost_no_step(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    append_json_line(tmp_path / "events" / "x.jsonl", claimed(1.0))
    assert summarize(RunDir(tmp_path), None)["steps_lost"] == 0


def test_summary_has_the_interruptions(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for directory in (run.events, run.train_metrics.parent):
        directory.mkdir()
    events = (
        *FIRST,
        happened(31.0, "interruption", cause="crashed", step=57, failed_at=30.0),
        happened(32.0, "rendezvous", round=2, port=1, members=[1]),
        started(40.0, step=55),
        happened(81.0, "attempt_ended", cause="completed", step=90),
    )
    for event in events:
        append_json_line(run.events / "x.jsonl", event)
    append_json_line(run.train_metrics, {"step": 90, "epoch": 1, "time": 80.0, "train_seconds": 60.0})
    summary = json.loads(json.dumps(summarize(run, None)))
    assert (summary["state"], summary["steps_lost"], summary["goodput"]) == ("completed", 2, 0.75)
    assert [interruption["cause"] for interruption in summary["interruptions"]] == ["crashed"]
    assert summary["recovery"]["crashed"]["median_seconds"] == 10.0
    assert (summary["attempts"][0]["nodes"], summary["attempts"][0]["members"]) == (["a", "b"], ["b"])
