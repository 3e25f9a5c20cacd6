"""The ledger read as attempts, and the claims that start them."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc.core.attempts import (
    Attempt,
    attempts_of,
    budget_now,
    budget_of,
    last_job_id,
    lost_nodes,
    may_restart_after,
    not_continued,
    outcome_of,
)
from hpc.core.causes import PastInterruption
from hpc.core.errors import TorchrelayError
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from jobs.claim import claim, event_file, join, refuse
from jobs.node_attempt import NodeAllocation


def place(job_id: str = "7", restart: int = 0, node_rank: int = 0) -> NodeAllocation:
    return NodeAllocation(
        cluster="slurm", job_id=job_id, restart=restart, node_rank=node_rank, hostnames=("gpu01", "gpu02"), cpus=None
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "events").mkdir()
    return RunDir(tmp_path)


HISTORY = [
    {"time": 0.0, "event": "submitted", "job_id": "7", "cluster": "slurm"},
    {"time": 1.0, "event": "claimed", "attempt": 1, "job_id": "7", "restart": 0, "secret": "aa", "nodes": ["a", "b"]},
    {"time": 2.0, "event": "train_started", "attempt": 1, "step": 0, "world_size": 4},
    {"time": 3.0, "event": "interruption", "attempt": 1, "cause": "crashed", "step": 7, "signature": "1: KeyError"},
    {"time": 3.5, "event": "rendezvous", "attempt": 1, "round": 2, "port": 1, "members": [1]},
    {"time": 4.0, "event": "train_started", "attempt": 1, "step": 5, "world_size": 4},
    {"time": 12.0, "event": "attempt_ended", "attempt": 1, "cause": "node_failure", "step": 20, "detail": None},
    {"time": 20.0, "event": "claimed", "attempt": 2, "job_id": "7", "restart": 1, "secret": "bb", "nodes": ["c", "d"]},
    {"time": 21.0, "event": "train_started", "attempt": 2, "step": 10, "world_size": 2},
]


def test_attempts_of_a_history() -> None:
    first, second = attempts_of(HISTORY)
    assert (first.nodes, first.cause, first.first_step, first.last_step) == (("a", "b"), "node_failure", 0, 20)
    assert (first.started, first.training_started, first.ended) == (1.0, 2.0, 12.0)
    assert (second.first_step, second.ended) == (10, None)
    crashed = PastInterruption(cause="crashed", step=7, restored_step=0, signature="1: KeyError")
    assert (first.interruptions, first.members) == ((crashed,), ("b",))
    assert first.history == (crashed, PastInterruption(cause="node_failure", step=20, restored_step=5))
    assert second.members == ("c", "d")


def test_attempt_has_what_its_claim_says() -> None:
    first, second = attempts_of([{**HISTORY[1], "port": 5, "addresses": ["10.0.0.1"]}, HISTORY[-2]])
    assert (first.attempt, first.job_id, first.restart, first.secret) == (1, "7", 0, "aa")
    assert (first.port, first.addresses, first.members) == (5, ("10.0.0.1",), ("a", "b"))
    assert (second.port, second.addresses, second.history) == (0, (), ())
    unknown = (second.first_step, second.last_step, second.interrupted_at, second.failed_at, second.resumed)
    assert {*unknown, second.detail, second.signature} == {None}


def test_attempts_are_in_the_order_of_their_numbers_whatever_the_clocks_say() -> None:
    late_claim = {**HISTORY[1], "time": 99.0}
    events = [*HISTORY[2:], late_claim, {"time": 100.0, "event": "train_started", "attempt": 7, "step": 3}]
    first, second = attempts_of(events)
    assert (first.attempt, first.ended, second.attempt) == (1, 12.0, 2)


def test_rendezvous_with_a_node_that_the_claim_lacks_has_the_others_as_members() -> None:
    joined = {"time": 5.0, "event": "rendezvous", "attempt": 1, "round": 3, "port": 1, "members": [2, 1, 0, -1]}
    assert attempts_of([*HISTORY, joined])[0].members == ("b", "a")


def test_end_that_another_process_recorded_is_the_last_sign_of_life() -> None:
    end = {**HISTORY[-3], "last_heard": 9.0, "failed_at": 8.0, "detail": "no heartbeat", "signature": "1: x"}
    [attempt] = attempts_of([*HISTORY[:-3], end])
    assert (attempt.ended, attempt.failed_at, attempt.detail, attempt.signature) == (9.0, 8.0, "no heartbeat", "1: x")


def test_interruption_leaves_the_step_of_the_ranks_unknown_until_they_start_again() -> None:
    interrupted = {**HISTORY[3], "failed_at": 2.9}
    [attempt] = attempts_of([*HISTORY[:3], interrupted])
    assert (attempt.restored_step, attempt.interrupted_at) == (None, 2.9)
    again = {**interrupted, "time": 3.2, "cause": "hang"}
    assert [one.cause for one in attempts_of([*HISTORY[:3], interrupted, again])[0].interruptions] == [
        "crashed",
        "hang",
    ]
    without_step = {"time": 3.0, "event": "interruption", "attempt": 1, "cause": "lost"}
    [attempt] = attempts_of([*HISTORY[:3], without_step])
    assert attempt.interruptions == (PastInterruption(cause="lost", restored_step=0),)


def ended(cause: str, step: int | None, restored: int | None = None) -> Attempt:
    return replace(attempts_of(HISTORY)[0], cause=cause, last_step=step, restored_step=restored, interruptions=())


CRASHED = PastInterruption(cause="crashed", step=20, restored_step=10)


def test_failures_without_progress() -> None:
    assert budget_of([]).failures == 0
    assert budget_of([ended("crashed", None)]).failures == 1
    assert budget_of([ended("crashed", None), ended("crashed", None)]).failures == 2
    assert budget_of([ended("crashed", 20, 10), ended("crashed", 20, 15)]).failures == 1, "it began at a later step"
    assert budget_of([ended("crashed", 20, 10), ended("preempted", 20, 10), ended("crashed", 20, 10)]).failures == 2
    assert budget_of([ended("crashed", 20, 10), ended("preempted", 30, 20), ended("crashed", 30, 20)]).failures == 1


def test_failures_inside_an_attempt_count_like_those_that_end_one() -> None:
    crashed_inside = replace(ended("preempted", 20), interruptions=(CRASHED,))
    assert budget_of([crashed_inside, ended("crashed", 20)]).failures == 2
    assert budget_of([crashed_inside, ended("crashed", 21, 20)]).failures == 1, "it began at a later step"
    assert budget_of([ended("crashed", 20), replace(ended("hang", 20), interruptions=(CRASHED,))]).failures == 2
    assert budget_of([ended("crashed", 20, 10), replace(ended("hang", 20), interruptions=(CRASHED,))]).failures == 3


def test_interruption_that_ended_the_attempt_counts_once() -> None:
    bad = replace(CRASHED, cause="bad_node")
    attempt = replace(ended("bad_node", 20), interruptions=(bad,), interrupted_at=9.0, failed_at=9.0)
    assert budget_of([attempt]).failures == 1
    assert budget_of([replace(attempt, failed_at=10.0)]).failures == 2, "another one"
    assert budget_of([replace(attempt, failed_at=None, interrupted_at=None)]).failures == 2, "their times are unknown"
    first = replace(CRASHED, step=15)
    last = replace(attempt, cause="lost", last_step=21, interruptions=(first, bad))
    assert last.history == (first, replace(bad, cause="lost", step=21)), "the end knows more than the interruption"


def test_attempt_that_began_at_a_later_step_has_used_nothing() -> None:
    running = replace(ended("crashed", None), cause=None)
    assert budget_now([ended("crashed", 20), running]).used != []
    assert budget_now([ended("crashed", 20), replace(running, restored_step=20)]).used == []
    assert budget_now([ended("crashed", 20)]).failures == 1
    assert budget_now([ended("crashed", 20), ended("crashed", 20)]).failures == 2
    assert budget_now([ended("preempted", 9), ended("crashed", 20), replace(running, restored_step=20)]).used == []
    assert budget_now([]).used == []


def test_claims_are_numbered_and_exclusive(run: RunDir) -> None:
    assert claim(run, place(), 1, "n").attempt == 1
    event_file(run, 2, 0).append("claimed", attempt=2, job_id="8", restart=0, secret="x", port=1, nodes=[])
    assert claim(run, place(restart=1), 1, "n").attempt == 3
    event_file(run, 4, 0).append("something else")
    with pytest.raises(TorchrelayError, match=r"attempt 4 .* has just been claimed"):
        claim(run, place(restart=2), 1, "n")


def test_agent_joins_the_claim_of_its_own_start(run: RunDir) -> None:
    made = claim(run, place(restart=1), 1, "n")
    assert join(run, place(restart=1, node_rank=1), lambda: False, timeout_seconds=60.0) == made
    for later_start_or_another_job in (place(restart=2, node_rank=1), place("9", restart=1, node_rank=1)):
        with pytest.raises(TorchrelayError, match="did not start within"):
            join(run, later_start_or_another_job, lambda: False, timeout_seconds=0.0)


def test_join_of_an_ended_attempt_fails_at_once(run: RunDir) -> None:
    claim(run, place(), 1, "n")
    EventWriter(run.events / "x.jsonl").append("attempt_ended", attempt=1, cause="crashed")
    with pytest.raises(TorchrelayError, match="attempt 1 ended before this node could join it"):
        join(run, place(node_rank=1), lambda: False, timeout_seconds=60.0)


def test_node_does_not_join_an_attempt_twice(run: RunDir) -> None:
    """submitit's local executor restarts a job without counting."""
    head, other = (replace(place(node_rank=rank), cluster="local") for rank in (0, 1))
    claim(run, head, 1, "n")
    event_file(run, 1, 1).append("joined", attempt=1, node="gpu02")
    EventWriter(run.events / "x.jsonl").append("attempt_ended", attempt=1, cause="requeued")
    with pytest.raises(TorchrelayError, match="did not start within"):
        join(run, other, lambda: False, timeout_seconds=0.0)
    again = claim(run, head, 1, "n")
    assert join(run, other, lambda: False, timeout_seconds=60.0) == again


def test_start_of_a_slurm_job_makes_one_attempt(run: RunDir) -> None:
    claim(run, place(), 1, "n")
    with pytest.raises(TorchrelayError, match="job 7 has already started an attempt"):
        claim(run, place(), 1, "n")
    assert claim(run, place(restart=1), 1, "n").attempt == 2


def test_join_follows_a_refusal(run: RunDir) -> None:
    refuse(run, place(restart=1), "the run was cancelled")
    with pytest.raises(TorchrelayError, match="the run was cancelled"):
        join(run, place(restart=1, node_rank=1), lambda: False, timeout_seconds=60.0)


def test_join_times_out(run: RunDir) -> None:
    with pytest.raises(TorchrelayError, match="head node gpu01 did not start"):
        join(run, place(node_rank=1), lambda: False, timeout_seconds=0.0)
    assert join(run, place(node_rank=1), lambda: True, timeout_seconds=60.0) is None, "told to stop"


def test_newest_job_is_known_though_the_clocks_were_set_back() -> None:
    events = [
        {"time": 9000.0, "event": "submitted", "job_id": "7"},
        {"time": 9001.0, "event": "claimed", "attempt": 1, "job_id": "7"},
        {"time": 5400.0, "event": "resubmitted", "attempt": 1, "job_id": "8", "excluded": []},
    ]
    assert last_job_id(sorted(events, key=lambda event: event["time"])) == "8"
    events.append({"time": 5000.0, "event": "claimed", "attempt": 2, "job_id": "9"})
    assert last_job_id(sorted(events, key=lambda event: event["time"])) == "9"
    requeued = {"time": 1.0, "event": "requeued", "attempt": 2, "job_id": "10"}
    assert last_job_id(events[:1]) == "7"
    assert last_job_id([requeued, *events]) == "10"
    again = [
        {**requeued, "event": event, "job_id": job_id} for event, job_id in (("resubmitted", "11"), ("requeued", "12"))
    ]
    assert [last_job_id([requeued, *again]), last_job_id(again[::-1])] == ["12", "11"], "the later of the two"
    assert last_job_id([{"time": 1.0, "event": "train_started", "attempt": 9}]) is None
    assert last_job_id([]) is None


def test_node_is_lost_until_it_returns() -> None:
    lost, returned = ({"event": event, "node": "a"} for event in ("node_lost", "node_returned"))
    other = {"event": "node_lost", "node": "b"}
    assert lost_nodes([lost, other, lost, {"event": "joined", "node": "c"}]) == ["a", "b", "a"]
    assert lost_nodes([lost, other, returned]) == ["b"]
    assert lost_nodes([returned, lost]) == ["a"]


CANCELLED = {"event": "cancelled"}
NOT_CONTINUED = {"event": "not_continued", "attempt": 1, "detail": "sbatch refused it"}


@pytest.mark.parametrize(
    ("cause", "changes", "events", "outcome"),
    [
        ("completed", {}, [], "completed"),
        ("completed", {}, [CANCELLED], "cancelled"),
        ("crashed", {}, [], None),
        ("crashed", {}, [NOT_CONTINUED], "failed"),
        ("crashed", {}, [{**NOT_CONTINUED, "attempt": 2}], None),
        ("crashed", {}, [{**NOT_CONTINUED, "event": "resubmitted"}], None),
        ("crashed", {"resumed": 9.0}, [NOT_CONTINUED], None),
        ("completed", {"resumed": 9.0}, [], None),
        ("bad_input", {}, [], "failed"),
        ("cancelled", {}, [], None),
        ("cancelled", {}, [NOT_CONTINUED], None),
        (None, {}, [NOT_CONTINUED], None),
    ],
)
def test_outcome_of_a_run(
    cause: str | None, changes: dict[str, float], events: list[dict[str, object]], outcome: str | None
) -> None:
    attempts = [replace(attempts_of(HISTORY)[0], cause=cause, interruptions=(), **changes)]
    assert outcome_of(attempts, events) == outcome
    assert outcome_of([], events) == ("cancelled" if CANCELLED in events else None)


def test_reason_why_no_job_followed_is_that_of_the_attempt() -> None:
    attempt = attempts_of(HISTORY)[0]
    other = {**NOT_CONTINUED, "attempt": 2, "detail": "another"}
    assert not_continued(attempt, [other, NOT_CONTINUED]) == "sbatch refused it"
    assert not_continued(attempt, [other]) is None


def test_attempt_without_a_recorded_end_counts_as_lost() -> None:
    running = replace(attempts_of(HISTORY)[0], cause=None, last_step=None, interruptions=())
    assert may_restart_after([])
    assert may_restart_after([running])
    assert may_restart_after([running] * 4)
    lost = [replace(running, cause="lost")] * 4
    assert not may_restart_after([*lost, running])
    assert may_restart_after([*lost, replace(running, cause="preempted")])


def test_failures_before_a_resumption_no_longer_count() -> None:
    failed = {"event": "attempt_ended", "cause": "crashed", "step": 12, "signature": "1: KeyError"}
    again = [{"time": 31.0, **failed, "attempt": 2}]
    events = [*HISTORY[:-3], {"time": 13.0, **failed, "attempt": 1}, *HISTORY[-2:-1], *again]
    assert not may_restart_after(attempts_of(events)), "the same failure twice"
    resumed = [*events, {"time": 40.0, "event": "resumed", "attempt": 2, "number": 1, "cancellations": 0}]
    assert may_restart_after(attempts_of(resumed))
    assert budget_of(attempts_of(resumed)).row == ()
    third = [{**HISTORY[-2], "time": 50.0, "attempt": 3}, {"time": 60.0, **failed, "attempt": 3}]
    assert may_restart_after(attempts_of([*resumed, *third]))
    assert budget_of(attempts_of([*resumed, *third])).row == ("crashed",)
