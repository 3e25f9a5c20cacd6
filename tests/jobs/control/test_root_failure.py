"""Which of the ranks that ended together failed first."""

from typing import Any

import pytest

from hpc.run.events.kinds import RankFailed
from jobs.control import root_failure
from jobs.control.root_failure import RootFailure


def failure(rank: int, at: float, **fields: Any) -> RankFailed:
    usual = {"node": f"n{rank}", "round": 1, "restarts": 0, "started_at": 1.0, "exit_code": 1, "signal": None,
             "cause": "crashed", "step": 7, "detail": ""}  # fmt: skip
    return RankFailed(rank=rank, failed_at=at, **{**usual, **fields})


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> RootFailure:
    monkeypatch.setattr(root_failure, "_SETTLE_SECONDS", 0.0)
    return RootFailure()


def test_rank_that_lost_its_peer_did_not_fail_first(root: RootFailure) -> None:
    consequence = failure(0, 5.0, detail="RuntimeError: Connection closed by peer [10.0.0.2]:123")
    assert root.find({consequence, failure(1, 5.3)}, all_heard=True) == failure(1, 5.3)


def test_bad_node_comes_before_ranks_that_left_because_of_it(root: RootFailure) -> None:
    bad_node = failure(1, 5.3, cause="bad_node")
    assert root.find({failure(0, 5.0), bad_node}, all_heard=True) == bad_node


def test_ranks_that_fail_again_on_a_bad_node_are_no_further_failure(root: RootFailure) -> None:
    bad_node = failure(1, 5.3, cause="bad_node")
    again = failure(1, 9.0, cause="bad_node", started_at=8.9, restarts=1)
    next_round = failure(0, 12.0, started_at=11.0, round=2)
    assert root.find({bad_node}, all_heard=True) == bad_node
    assert root.find({bad_node, again}, all_heard=True) is None
    assert root.find({bad_node, again, next_round}, all_heard=True) == next_round


def test_victims_of_a_known_interruption_are_no_failures(root: RootFailure) -> None:
    known = failure(2, 4.0)
    assert root.find({known}, all_heard=True) == known
    assert root.find({known, failure(0, 5.0)}, all_heard=True) is None, "it was started before the interruption"
    root.aborted_at = 7.0
    aborted = failure(1, 9.0, started_at=8.0, signal="SIGABRT")
    assert root.find({aborted}, all_heard=True) is None, "the directive to abort came late"
    peer = failure(0, 9.1, started_at=8.1, detail="Connection closed by peer")
    assert root.find({aborted, peer}, all_heard=True) is None, "it lost the one that was aborted"
    restarted = failure(1, 9.5, started_at=8.0)
    assert root.find({aborted, restarted}, all_heard=True) == restarted


@pytest.mark.parametrize(("seconds", "own"), [(-0.25, True), (0.0, False), (14.75, False), (15.0, True)])
def test_abort_is_that_of_the_directive_if_it_comes_soon_after_it(root: RootFailure, seconds: float, own: bool) -> None:
    root.aborted_at = 7.0
    aborted = failure(1, 7.0 + seconds, started_at=6.0, signal="SIGABRT")
    assert root.find({aborted}, all_heard=True) == (aborted if own else None)


@pytest.mark.parametrize(("seconds", "together"), [(1.75, True), (2.0, True), (2.25, False)])
def test_ranks_that_were_started_within_two_seconds_failed_together(
    root: RootFailure, seconds: float, together: bool
) -> None:
    first, other = failure(0, 5.0, started_at=4.0), failure(1, 9.0, started_at=4.0 + seconds)
    assert root.find({first, other}, all_heard=True) == first
    assert root.find({first, other}, all_heard=True) == (None if together else other)


def test_ranks_that_end_within_a_second_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(root_failure.time, "monotonic", lambda: clock[0])
    root, late, early = RootFailure(), failure(0, 5.1), failure(1, 5.0)
    assert root.find({late}, all_heard=True) is None
    clock[0] = 100.75
    assert root.find({late, early}, all_heard=True) is None
    clock[0] = 101.0
    assert root.find({late, early}, all_heard=True) == early
    next_one = failure(0, 9.0, started_at=8.0)
    assert root.find({late, early, next_one}, all_heard=True) is None, "it settles, too"


def test_victim_of_one_abort_is_no_failure_after_the_next(root: RootFailure) -> None:
    root.aborted_at = 7.0
    aborted = failure(1, 9.0, started_at=6.0, signal="SIGABRT")
    other = failure(0, 9.0, started_at=6.0, signal="SIGABRT")
    assert root.find({aborted}, all_heard=True) is None
    assert root.find({aborted, other}, all_heard=True) is None
    root.aborted_at = 20.0
    assert root.find({aborted, other}, all_heard=True) is None
