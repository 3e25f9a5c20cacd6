"""Which nodes take part in the next round: pure, from what is known of each node to what is to be done."""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.control.messages import Directive, NodeStatus, Phase

_ABLE = frozenset({Phase.READY, Phase.RUNNING, Phase.ENDED})
# How long the nodes that are ready wait for one that may still be staging, if they could begin without it.
_PATIENCE_SECONDS = 60.0
# A node that has not said a word by then never will: its file systems are not mounted, or its network is closed.
_SPEECHLESS_SECONDS = 600.0
# A port can be taken between its test and its use; five times in a row it is something else.
_MOST_FAILED_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """How many nodes the run trains on. Those beyond the most are spares."""

    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class MembershipView:
    """What the head node's agent sees."""

    nodes: int
    """In the allocation."""
    reports: Mapping[int, NodeStatus]
    """By node rank, of those that have been heard of."""
    gone: frozenset[int]
    """Nodes that are lost, or unfit to take part."""
    waited_seconds: float
    """Since the attempt began."""
    failed_rounds: int
    """In a row, in which torchrun itself failed."""

    @property
    def able(self) -> list[int]:
        """Nodes that could take part now, the lowest node rank first."""
        return sorted(rank for rank, report in self.reports.items() if report.phase in _ABLE and rank not in self.gone)

    @property
    def hoped_for(self) -> int:
        """Nodes that may yet become able."""
        here = [rank for rank, report in self.reports.items() if report.phase is Phase.STARTING]
        hopeful = self.waited_seconds < _SPEECHLESS_SECONDS
        unheard = [rank for rank in range(self.nodes) if rank not in self.reports and hopeful]
        return sum(1 for rank in (*here, *unheard) if rank not in self.gone)


@dataclass(frozen=True, kw_only=True)
class NextRound:
    """What is to be done: nothing, a round of other nodes, or an end."""

    members: tuple[int, ...] = ()
    """Of the next round; none: go on as it is."""
    done: bool = False
    """Every member's torchrun has ended well."""
    failed: str = ""
    """Why the attempt cannot go on."""


def next_step(orders: Directive, view: MembershipView, limits: NodeLimits) -> NextRound:
    """Decide about the round that is under way, or the first one."""
    missing = [rank for rank in orders.members if rank not in view.able]
    if orders.round and not missing:
        return _go_on(orders, view, limits)
    if len(view.able) >= limits.most or (len(view.able) >= limits.least and _need_not_wait(orders, view)):
        return NextRound(members=_choose(orders, view, limits))
    if len(view.able) + view.hoped_for < limits.least:
        return NextRound(
            failed=f"{len(view.able)} of the {view.nodes} nodes are left, and the run needs {limits.least}"
        )
    return NextRound()


def _need_not_wait(orders: Directive, view: MembershipView) -> bool:
    """Whether to begin with fewer nodes than there might be: a training that was under way goes on at once."""
    return orders.round > 0 or not view.hoped_for or view.waited_seconds > _PATIENCE_SECONDS


def _choose(orders: Directive, view: MembershipView, limits: NodeLimits) -> tuple[int, ...]:
    """Those that were in it stay in it; the others take the places that are free."""
    stayed = [rank for rank in orders.members if rank in view.able]
    others = [rank for rank in view.able if rank not in stayed]
    return tuple([*stayed, *others][: limits.most])


def _go_on(orders: Directive, view: MembershipView, limits: NodeLimits) -> NextRound:
    """All members are there: has the round ended, or should another node join it?"""
    ended = [view.reports[rank] for rank in orders.members if _has_ended(view.reports[rank], orders)]
    if any(report.exit_code for report in ended):
        if view.failed_rounds >= _MOST_FAILED_ROUNDS:
            return NextRound(failed=f"torchrun failed {view.failed_rounds} times in a row")
        return NextRound(members=_choose(orders, view, limits))
    if ended:
        return NextRound(done=len(ended) == len(orders.members))
    # Each new round costs all ranks a start: late nodes join together, once none is still on its way.
    members = orders.members if view.hoped_for else _choose(orders, view, limits)
    return NextRound(members=members) if len(members) > len(orders.members) else NextRound()


def _has_ended(report: NodeStatus, orders: Directive) -> bool:
    return report.phase is Phase.ENDED and report.round == orders.round
