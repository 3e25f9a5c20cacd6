"""What a run's events say of it: its newest job, its lost nodes, its cancellations, how it has ended."""

import pytest
from msgspec.structs import replace
from support.events import (
    attempt_ended,
    cancelled,
    claimed,
    event,
    joined,
    resubmitted,
    resumed,
    submitted,
    train_started,
)

from hpc.run.events.history import History
from hpc.run.events.kinds import Event


def last_job_id(*events: Event) -> str | None:
    return History(events).last_job_id


def test_newest_job_is_known_though_the_clocks_were_set_back() -> None:
    first, claim, second = submitted(9000.0), claimed(9001.0), resubmitted(5400.0)
    assert last_job_id(second, first, claim) == "8"
    next_claim = claimed(5000.0, 2, job_id="9")
    assert last_job_id(next_claim, second, first, claim) == "9"
    requeued = event("requeued", 1.0, attempt=2, job_id="10")
    assert last_job_id(first) == "7"
    assert last_job_id(requeued, first, claim, second, next_claim) == "10"
    again = resubmitted(1.0, "11", attempt=2), event("requeued", 1.0, attempt=2, job_id="12")
    assert [last_job_id(requeued, *again), last_job_id(*again[::-1])] == ["12", "11"], "the later of the two"
    assert last_job_id(train_started(1.0, attempt=9)) is None
    assert last_job_id() is None


def test_ids_of_all_jobs_are_known() -> None:
    assert History([submitted(), claimed(), resubmitted(), joined()]).job_ids == {"7", "8"}


def test_node_is_lost_until_it_returns() -> None:
    lost, returned = event("node_lost", node="a"), event("node_returned", node="a")
    other = event("node_lost", node="b")
    assert History([lost, other, lost, joined(node="c")]).lost_nodes == ["a", "b", "a"]
    assert History([lost, other, returned]).lost_nodes == ["b"]
    assert History([returned, lost]).lost_nodes == ["a"]


@pytest.mark.parametrize(
    ("events", "is_cancelled"),
    [
        ([], False),
        ([cancelled()], True),
        ([cancelled(), resumed(cancellations=1)], False),
        ([cancelled(), resumed(cancellations=0)], True),
        ([cancelled(), resumed(cancellations=1), cancelled()], True),
        ([resumed(cancellations=1), cancelled()], False),
        ([cancelled(), cancelled(), resumed(cancellations=2), resumed(cancellations=1)], False),
    ],
)
def test_cancellation_counts_until_it_is_taken_back(events: list[Event], is_cancelled: bool) -> None:
    assert History(events).is_cancelled is is_cancelled


def test_cancellation_is_for_good_if_its_user_said_so() -> None:
    assert History([cancelled(), cancelled(final=True), resumed(cancellations=2)]).is_cancelled_for_good
    assert not History([cancelled(), claimed()]).is_cancelled_for_good


STOPPED = event("not_continued", 20.0, attempt=1, detail="sbatch refused it")


@pytest.mark.parametrize(
    ("cause", "more", "outcome"),
    [
        ("completed", [], "completed"),
        ("completed", [cancelled()], "cancelled"),
        ("crashed", [], None),
        ("crashed", [STOPPED], "failed"),
        ("crashed", [replace(STOPPED, attempt=2)], None),
        ("crashed", [resumed(), STOPPED], None),
        ("completed", [resumed()], None),
        ("bad_input", [], "failed"),
        ("cancelled", [], "cancelled"),
        ("cancelled", [STOPPED], "cancelled"),
        (None, [STOPPED], None),
        ("preempted", [event("scancelled", attempt=1, job_id="7")], "cancelled"),
        ("preempted", [resubmitted(), event("scancelled", attempt=1, job_id="7")], None),
    ],
)
def test_outcome_of_a_run(cause: str | None, more: list[Event], outcome: str | None) -> None:
    ends = [attempt_ended(12.0, cause)] if cause else []
    assert History([submitted(1.0), claimed(2.0), *ends, *more]).outcome == outcome
    assert History([submitted(1.0), claimed(2.0), *ends], complete=True).outcome == "completed"


def test_reason_why_no_job_followed_is_that_of_the_last_attempt() -> None:
    run = [claimed(1.0), attempt_ended(12.0, "crashed")]
    other = event("not_continued", attempt=2, detail="another")
    assert History([*run, other, STOPPED]).not_continued == "sbatch refused it"
    assert History([*run, other]).not_continued is None
