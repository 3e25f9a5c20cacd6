"""The failures that interrupt an attempt or end it, and whether the attempt may go on after one. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from hpc.base.text import few
from hpc.run.causes import Cause
from hpc.run.events.attempts import attempts_of, budget_of
from hpc.run.events.history import History
from hpc.run.events.kinds import Interrupted, TrainStarted
from hpc.run.restart_budget import Budget, PastInterruption, signature_of
from jobs.control.attempt_view import AttemptView
from jobs.control.messages import Phase
from jobs.control.silent_nodes import LINK_SECONDS

# A failure that is older than this does not explain a lack of nodes now.
_RECENT_SECONDS = LINK_SECONDS + 60.0


def with_known_steps(failure: Interrupted, *, reports_steps: bool) -> Interrupted:
    """Return a failure with its step if the program reports steps, and else with the counted steps."""
    return structs.replace(failure, **({"counted_steps": None} if reports_steps else {"step": None}))


def budget_with(
    failure: Interrupted, interruptions: Sequence[PastInterruption], history: History
) -> tuple[PastInterruption, Budget]:
    """Return a failure of the last attempt in `history` as an interruption, and the budget of the run after it.

    `interruptions` are the earlier ones of the attempt: because of a full disk, the history may lack them.
    """
    *earlier, this = attempts_of(
        event
        for event in history.events
        # Leave out the starts of ranks that have already replaced the failed ones.
        if not isinstance(event, TrainStarted) or event.time < (failure.failed_at or 0.0)
    )
    interruption = this.interrupted_by(failure.cause, failure.step, failure.signature, failure.failed_at)
    return interruption, budget_of([*earlier, replace(this, interruptions=(*interruptions, interruption))])


def lack_of_nodes(reason: str, view: AttemptView, last: Interrupted | None, this: Interrupted) -> Interrupted:
    """Return why too few nodes are left: the `last` failure if it is recent, or `this` with the missing nodes."""
    out = {rank: status for rank, status in view.statuses.items() if status.phase in {Phase.FAILED, Phase.BAD_NODE}}
    if last and (this.noticed_at or 0.0) - (last.noticed_at or 0.0) < _RECENT_SECONDS and not out:
        return structs.replace(last, detail=f"{last.detail}; {reason}")
    lost = [view.hostnames[rank] for rank in sorted(view.lost)]
    bad_nodes = [view.hostnames[rank] for rank, status in out.items() if status.phase is Phase.BAD_NODE]
    own = next((status.cause for status in out.values()), Cause.CRASHED)
    cause = Cause.NODE_FAILURE if lost else Cause.BAD_NODE if bad_nodes else own
    parts = [f"{view.hostnames[rank]}: {status.detail}" for rank, status in out.items()]
    parts += [f"lost contact with {few(lost)}"] if lost else []
    detail = "; ".join([*parts, reason])
    signature = signature_of(detail) if cause is Cause.CRASHED else None
    return structs.replace(
        this, cause=cause, detail=detail, node=next(iter([*bad_nodes, *lost]), None), signature=signature
    )
