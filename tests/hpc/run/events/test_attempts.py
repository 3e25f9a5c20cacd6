"""The ledger read as attempts, and the claims that start them."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed
from support.events import attempt_ended, claimed, event, interruption, resumed, submitted, train_started

from hpc.base.errors import TorchrelayError
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt, attempts_of, budget_now, budget_of, may_restart_after
from hpc.run.events.kinds import AttemptEnded, Claimed, Event, Joined, RoundStarted
from hpc.run.events.ledger import EventWriter
from hpc.run.restart_budget import PastInterruption
from hpc.run.rundir import RunDir
from jobs.claim import claim, join
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
    submitted(1.0),
    claimed(1.0, secret="aa", nodes=("a", "b")),
    train_started(2.0, world_size=4),
    interruption(3.0, step=7, signature="1: KeyError"),
    event("rendezvous", 3.5, attempt=1, round=2, port=1, members=[1]),
    train_started(4.0, 5, world_size=4),
    attempt_ended(12.0, "node_failure", step=20),
    claimed(20.0, 2, restart=1, secret="bb", nodes=("c", "d")),
    train_started(21.0, 10, attempt=2, world_size=2),
]


def test_attempts_of_a_history() -> None:
    first, second = attempts_of(HISTORY)
    assert (first.nodes, first.cause, first.first_step, first.last_step) == (("a", "b"), "node_failure", 0, 20)
    assert (first.started, first.ended) == (1.0, 12.0)
    assert (second.first_step, second.ended) == (10, None)
    crashed = PastInterruption(cause="crashed", step=7, restored_step=0, signature="1: KeyError")
    assert (first.interruptions, first.members) == ((crashed,), ("b",))
    assert first.history == (crashed, PastInterruption(cause="node_failure", step=20, restored_step=5, ran_seconds=8.5))
    assert second.members == ("c", "d")


def test_attempts_are_in_the_order_of_their_numbers_whatever_the_clocks_say() -> None:
    late_claim = changed(HISTORY[1], time=99.0)
    events = [*HISTORY[2:], late_claim, train_started(100.0, 3, attempt=7)]
    first, second = attempts_of(events)
    assert (first.attempt, first.ended, second.attempt) == (1, 12.0, 2)


def test_rendezvous_with_a_node_that_the_claim_lacks_has_the_others_as_members() -> None:
    joined = RoundStarted(time=5.0, attempt=1, members=(2, 1, 0, -1))
    assert attempts_of([*HISTORY, joined])[0].members == ("b", "a")


def test_end_that_another_process_recorded_is_the_last_sign_of_life() -> None:
    end = changed(HISTORY[-3], last_heard=9.0, failed_at=8.0, detail="no heartbeat", signature="1: x")
    [attempt] = attempts_of([*HISTORY[:-3], end])
    assert (attempt.ended, attempt.failed_at, attempt.detail, attempt.signature) == (9.0, 8.0, "no heartbeat", "1: x")


def test_interruption_leaves_the_step_of_the_ranks_unknown_until_they_start_again() -> None:
    interrupted = changed(HISTORY[3], failed_at=2.9)
    [attempt] = attempts_of([*HISTORY[:3], interrupted])
    assert (attempt.restored_step, attempt.interrupted_at) == (None, 2.9)
    again = changed(interrupted, time=3.2, cause="hang")
    [attempt] = attempts_of([*HISTORY[:3], interrupted, again])
    assert [one.cause for one in attempt.interruptions] == ["crashed", "hang"]
    without_step = interruption(3.0, "lost", step=None)
    [attempt] = attempts_of([*HISTORY[:3], without_step])
    assert attempt.interruptions == (PastInterruption(cause="lost", restored_step=0),)


def ended(cause: str, step: int | None, restored: int | None = None) -> Attempt:
    return replace(attempts_of(HISTORY)[0], cause=cause, last_step=step, restored_step=restored, interruptions=())


CRASHED = PastInterruption(cause="crashed", step=20, restored_step=10)


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
    with pytest.raises(TorchrelayError, match="job 7 has already started an attempt"):
        claim(run, place(), 1, "n")
    EventWriter(ledger.agent_file(run, 2, 0), 2).append(Claimed(attempt=2, job_id="8", restart=0, secret="x", nodes=()))
    assert claim(run, place(restart=1), 1, "n").attempt == 3
    EventWriter(ledger.agent_file(run, 4, 0), 4).append(Joined(node="gpu01"))
    with pytest.raises(TorchrelayError, match=r"attempt 4 .* has just been claimed"):
        claim(run, place(restart=2), 1, "n")


def test_agent_joins_the_claim_of_its_own_start(run: RunDir) -> None:
    made = claim(run, place(restart=1), 1, "n")
    assert join(run, place(restart=1, node_rank=1), lambda: False, timeout_seconds=60.0) == made
    for later_start_or_another_job in (place(restart=2, node_rank=1), place("9", restart=1, node_rank=1)):
        with pytest.raises(TorchrelayError, match="first node, gpu01, did not start within"):
            join(run, later_start_or_another_job, lambda: False, timeout_seconds=0.0)
    assert join(run, place(restart=2, node_rank=1), lambda: True, timeout_seconds=60.0) is None, "told to stop"


def test_join_of_an_ended_attempt_fails_at_once(run: RunDir) -> None:
    claim(run, place(), 1, "n")
    EventWriter(run.events / "x.jsonl").append(AttemptEnded(attempt=1, cause="crashed"))
    with pytest.raises(TorchrelayError, match="attempt 1 ended before this node could join it"):
        join(run, place(node_rank=1), lambda: False, timeout_seconds=60.0)


def test_node_does_not_join_an_attempt_twice(run: RunDir) -> None:
    """submitit's local executor restarts a job without counting."""
    head, other = (replace(place(node_rank=rank), cluster="local") for rank in (0, 1))
    claim(run, head, 1, "n")
    EventWriter(ledger.agent_file(run, 1, 1), 1).append(Joined(node="gpu02"))
    EventWriter(run.events / "x.jsonl").append(AttemptEnded(attempt=1, cause="requeued"))
    with pytest.raises(TorchrelayError, match="did not start within"):
        join(run, other, lambda: False, timeout_seconds=0.0)
    again = claim(run, head, 1, "n")
    assert join(run, other, lambda: False, timeout_seconds=60.0) == again


def test_attempt_without_a_recorded_end_counts_as_lost() -> None:
    running = replace(attempts_of(HISTORY)[0], cause=None, last_step=None, interruptions=())
    assert may_restart_after([])
    assert may_restart_after([running])
    assert may_restart_after([running] * 9)
    lost = [replace(running, cause="lost")] * 9
    assert not may_restart_after([*lost, running])
    assert may_restart_after([*lost, replace(running, cause="preempted")])


def test_failures_before_a_resumption_no_longer_count() -> None:
    def failed(at: float, attempt: int) -> Event:
        return attempt_ended(at, "crashed", attempt=attempt, step=12, signature="1: KeyError")

    events = [*HISTORY[:-3], failed(13.0, 1), HISTORY[-2], failed(31.0, 2)]
    assert not may_restart_after(attempts_of(events)), "the same failure twice"
    again = [*events, resumed(40.0, attempt=2)]
    assert may_restart_after(attempts_of(again))
    assert budget_of(attempts_of(again)).row == ()
    third = [changed(HISTORY[-2], time=50.0, attempt=3), failed(60.0, 3)]
    assert may_restart_after(attempts_of([*again, *third]))
    assert budget_of(attempts_of([*again, *third])).row == ("crashed",)
