"""Decides which nodes take part in the next round, from what is known of each node. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.control.messages import Directive, NodeStatus, Phase

ABLE = frozenset({Phase.READY, Phase.RUNNING, Phase.ENDED})
"""Phases of nodes that can take part in a round."""
# Ready nodes wait this long for one that may still be staging, although they could start without it.
_WAIT_SECONDS = 60.0
# A node that has not reported within this time never will: its file systems are not mounted, or its network is closed.
_FIRST_REPORT_SECONDS = 600.0
# A port can be taken between its test and its use; five failures in a row have another cause.
_MAX_FAILED_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class MembershipView:
    """The states of the nodes and the limits of the run, from which `decide_round` chooses the members of a round."""

    num_nodes: int
    """Number of nodes in the allocation."""
    min_nodes: int
    max_nodes: int
    """The most nodes on which the run trains. Further nodes are spares."""
    statuses: Mapping[int, NodeStatus]
    """Status by node rank, of the nodes that have reported."""
    excluded: frozenset[int]
    """Node ranks that are lost, have failed the preflight, or hang."""
    awaited: frozenset[int] = frozenset()
    """Node ranks of lost nodes whose link may come back."""
    waited_seconds: float
    """Seconds since the attempt began."""
    failed_rounds: int
    """Number of successive rounds in which torchrun itself failed."""

    @property
    def able(self) -> list[int]:
        """Node ranks that could take part now, the lowest first."""
        found = {node_rank for node_rank, status in self.statuses.items() if status.phase in ABLE}
        return sorted(found - self.excluded)

    @property
    def num_pending(self) -> int:
        """Number of nodes that may yet become able."""
        starting = {node_rank for node_rank, status in self.statuses.items() if status.phase is Phase.STARTING}
        may_report = self.waited_seconds < _FIRST_REPORT_SECONDS
        unheard = set(range(self.num_nodes)) - self.statuses.keys() if may_report else set[int]()
        return len((starting | unheard) - self.excluded | self.awaited)


@dataclass(frozen=True, kw_only=True)
class RoundDecision:
    """Decision whether the round goes on, another round follows, or the attempt ends."""

    members: tuple[int, ...] = ()
    """Node ranks of the next round; empty if no other round follows now."""
    done: bool = False
    """Whether every member's torchrun has ended with 0."""
    failed: str = ""
    """Reason why the attempt cannot go on; empty if it can."""
    wait: bool = False
    """Whether the round must pause: too few nodes are left for it, but others may come."""


def decide_round(directive: Directive, view: MembershipView) -> RoundDecision:
    """Decide whether the current round goes on, ends the attempt, or is followed by another round."""
    able = view.able
    if directive.members and not directive.paused and set(directive.members) <= set(able):
        return _continue_round(directive, view)
    # Before the first round, wait up to a minute for nodes that may become able. Later, go on at once without them.
    need_not_wait = directive.round > 0 or not view.num_pending or view.waited_seconds > _WAIT_SECONDS
    if len(able) >= view.max_nodes or (len(able) >= view.min_nodes and need_not_wait):
        return RoundDecision(members=_choose(directive, view))
    if len(able) + view.num_pending < view.min_nodes:
        return RoundDecision(
            failed=f"only {len(able)} of {view.num_nodes} nodes can train, and the run needs {view.min_nodes}"
        )
    return RoundDecision(wait=directive.round > 0 and not directive.paused)


def _choose(directive: Directive, view: MembershipView) -> tuple[int, ...]:
    """Return the next members: members that are able stay, and other nodes take the free places."""
    able = dict.fromkeys(view.able)
    stayed = dict.fromkeys(node_rank for node_rank in directive.members if node_rank in able)
    others = [node_rank for node_rank in able if node_rank not in stayed]
    return tuple([*stayed, *others][: view.max_nodes])


def _continue_round(directive: Directive, view: MembershipView) -> RoundDecision:
    """Decide whether the round has ended, or other nodes should join it. All its members must be able to take part."""
    members = [view.statuses[node_rank] for node_rank in directive.members]
    if any(status.phase is Phase.READY and status.round == directive.round for status in members):
        return RoundDecision(members=_choose(directive, view))  # a member lost its link briefly, and ended its ranks
    ended = [status for status in members if status.phase is Phase.ENDED and status.round == directive.round]
    if any(status.exit_code for status in ended):
        if view.failed_rounds >= _MAX_FAILED_ROUNDS:
            return RoundDecision(failed=f"torchrun failed {view.failed_rounds} times in a row: see hpc logs --all")
        return RoundDecision(members=_choose(directive, view))
    if ended:
        return RoundDecision(done=len(ended) == len(members))
    # Each new round restarts all ranks, so late nodes join together, when no other node may still come.
    chosen = () if view.num_pending else _choose(directive, view)
    return RoundDecision(members=chosen) if len(chosen) > len(members) else RoundDecision()
