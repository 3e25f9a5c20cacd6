"""Decides which nodes take part in the next round, from what is known of each node. Pure."""

from dataclasses import dataclass

from jobs.control.attempt_view import AttemptView
from jobs.control.messages import Phase

# Ready nodes wait this long for one that may still be staging, although they could start without it.
_WAIT_SECONDS = 60.0
# A port can be taken between its test and its use; five failures in a row have another cause.
_MAX_FAILED_ROUNDS = 5


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


def decide_round(view: AttemptView) -> RoundDecision:
    """Decide whether the current round goes on, ends the attempt, or is followed by another round."""
    directive = view.directive
    able = view.able
    if directive.members and not directive.paused and set(directive.members) <= set(able):
        return _continue_round(view)
    # Before the first round, wait up to a minute for nodes that may become able. Later, go on at once without them.
    need_not_wait = directive.round > 0 or not view.num_pending or view.waited_seconds > _WAIT_SECONDS
    if len(able) >= view.max_nodes or (len(able) >= view.min_nodes and need_not_wait):
        return RoundDecision(members=_choose(view))
    if len(able) + view.num_pending < view.min_nodes:
        return RoundDecision(
            failed=f"only {len(able)} of {len(view.hostnames)} nodes can train, and the run needs {view.min_nodes}"
        )
    return RoundDecision(wait=directive.round > 0 and not directive.paused)


def _choose(view: AttemptView) -> tuple[int, ...]:
    """Return the next members: members that are able stay, and other nodes take the free places."""
    able = dict.fromkeys(view.able)
    stayed = dict.fromkeys(node_rank for node_rank in view.directive.members if node_rank in able)
    others = [node_rank for node_rank in able if node_rank not in stayed]
    return tuple([*stayed, *others][: view.max_nodes])


def _continue_round(view: AttemptView) -> RoundDecision:
    """Decide whether the round has ended, or other nodes should join it. All its members must be able to take part."""
    if view.has_left:
        return RoundDecision(members=_choose(view))
    if view.has_failed_torchrun:
        if view.failed_rounds >= _MAX_FAILED_ROUNDS:
            return RoundDecision(failed=f"torchrun failed {view.failed_rounds} times in a row: see hpc logs --all")
        return RoundDecision(members=_choose(view))
    num_members = len(view.directive.members)
    num_ended = sum(status.phase is Phase.ENDED for status in view.current)
    if num_ended:
        return RoundDecision(done=num_ended == num_members)
    # Each new round restarts all ranks, so late nodes join together, when no other node may still come.
    chosen = () if view.num_pending else _choose(view)
    return RoundDecision(members=chosen) if len(chosen) > num_members else RoundDecision()
