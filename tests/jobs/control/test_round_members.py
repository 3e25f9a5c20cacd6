"""Which nodes take part in the next round."""

from dataclasses import replace

from jobs.control.attempt_view import AttemptView
from jobs.control.messages import Directive, NodeStatus, Phase
from jobs.control.round_members import RoundDecision
from jobs.control.round_members import decide_round as decide_round_of

WAIT = RoundDecision()


def view(
    *phases: Phase | None, excluded: tuple[int, ...] = (), waited: float = 1.0, failed: int = 0, code: int = 0,
    min_nodes: int = 2, max_nodes: int = 2, awaited: tuple[int, ...] = (),
) -> AttemptView:  # fmt: skip
    """One node per phase; None: has not reported yet."""
    statuses = {
        node_rank: NodeStatus(node_rank=node_rank, phase=phase, round=1, exit_code=code if phase == Phase.ENDED else 0)
        for node_rank, phase in enumerate(phases)
        if phase is not None
    }
    return AttemptView(
        directive=Directive(),
        hostnames=[f"gpu{node_rank}" for node_rank in range(len(phases))],
        ranks_per_node=1,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        statuses=statuses,
        lost=frozenset(awaited),
        bad_nodes=frozenset(excluded),
        awaited=frozenset(awaited),
        waited_seconds=waited,
        failed_rounds=failed,
    )


def decide_round(directive: Directive, seen: AttemptView) -> RoundDecision:
    return decide_round_of(replace(seen, directive=directive))


def running(*members: int) -> Directive:
    return Directive(round=1, members=members, port=1)


READY, STARTING, RUNNING, ENDED, FAILED = Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.ENDED, Phase.FAILED


def test_first_round_begins_when_enough_nodes_are_ready() -> None:
    assert decide_round(Directive(), view(READY, None)) == WAIT
    assert decide_round(Directive(), view(READY, STARTING)) == WAIT
    assert decide_round(Directive(), view(READY, READY)) == RoundDecision(members=(0, 1))


def test_spare_that_is_not_ready_is_not_waited_for() -> None:
    assert decide_round(Directive(), view(READY, STARTING, READY)) == RoundDecision(members=(0, 2))


def test_elastic_run_waits_for_a_slow_node_but_not_for_ever() -> None:
    for seconds in (1.0, 60.0):
        assert decide_round(Directive(), view(READY, STARTING, min_nodes=1, waited=seconds)) == WAIT
    assert decide_round(Directive(), view(READY, STARTING, min_nodes=1, waited=61.0)) == RoundDecision(members=(0,))
    assert decide_round(Directive(), view(READY, FAILED, min_nodes=1)) == RoundDecision(members=(0,))


def test_node_that_never_reports_is_waited_for_for_ten_minutes() -> None:
    elastic = {"min_nodes": 1, "max_nodes": 3}
    assert decide_round(Directive(), view(READY, None, waited=599.0)) == WAIT
    assert decide_round(Directive(), view(READY, None, waited=600.0)).failed
    assert decide_round(running(0), view(RUNNING, READY, None, waited=599.0, **elastic)) == WAIT, "they join together"
    joined = RoundDecision(members=(0, 1))
    assert decide_round(running(0), view(RUNNING, READY, None, waited=600.0, **elastic)) == joined
    assert decide_round(running(0), view(RUNNING, READY, None, excluded=(2,), **elastic)) == joined, "it is lost"
    assert decide_round(running(0), view(RUNNING, READY, READY, awaited=(2,), **elastic)) == WAIT, "it may come back"


def test_nothing_changes_while_all_members_train() -> None:
    assert decide_round(running(0, 1), view(RUNNING, RUNNING)) == WAIT
    assert decide_round(running(0, 1), view(RUNNING, RUNNING, READY)) == WAIT


def test_spare_takes_the_place_of_a_lost_node() -> None:
    assert decide_round(running(0, 1), view(RUNNING, RUNNING, READY, excluded=(1,))) == RoundDecision(members=(0, 2))


def test_end_of_an_older_round_is_no_end_of_this_one() -> None:
    directive = Directive(round=2, members=(0, 1), port=1)
    assert decide_round(directive, view(ENDED, ENDED)) == WAIT


def test_round_ends_while_a_lost_node_may_come_back() -> None:
    alone = view(RUNNING, RUNNING, awaited=(1,))
    assert decide_round(running(0, 1), alone) == RoundDecision(wait=True)
    waiting = Directive(round=1, members=(0, 1), port=1, paused=True)
    assert decide_round(waiting, alone) == WAIT
    assert decide_round(waiting, view(READY, READY)) == RoundDecision(members=(0, 1)), "it is back"
    assert decide_round(waiting, view(READY, RUNNING, excluded=(1,))).failed, "it is not waited for any more"


def test_lost_node_is_not_waited_for_if_the_others_can_go_on() -> None:
    assert decide_round(running(0, 1), view(RUNNING, RUNNING, READY, awaited=(1,))) == RoundDecision(members=(0, 2))
    elastic = view(RUNNING, RUNNING, awaited=(1,), min_nodes=1)
    assert decide_round(running(0, 1), elastic) == RoundDecision(members=(0,))


def test_member_that_ended_its_ranks_by_itself_needs_a_new_round() -> None:
    """It heard nothing from the first node for some seconds, which the first node did not notice."""
    assert decide_round(running(0, 1), view(RUNNING, READY)) == RoundDecision(members=(0, 1))


def test_members_of_a_paused_round_form_the_next_one() -> None:
    paused = Directive(round=1, members=(0, 2), port=1, paused=True)
    assert decide_round(paused, view(READY, READY, READY)) == RoundDecision(members=(0, 2)), "they have the snapshots"
    assert decide_round(paused, view(READY, READY, RUNNING, excluded=(2,))) == RoundDecision(members=(0, 1))
    assert decide_round(paused, view(READY, FAILED, RUNNING, excluded=(2,))).failed
