"""The attempts of a run, from its events. Pure; runs everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.run.budget import Budget, PastInterruption, budget_after
from hpc.run.causes import Cause
from hpc.run.events.kinds import AttemptEnded, Claimed, Event, Interrupted, Resumed, RoundStarted, TrainStarted


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: from the claim of its head node's agent to its end. Times are seconds since the epoch."""

    attempt: int
    job_id: str
    restart: int
    secret: str
    port: int
    """On which the head node's agent listens to the other agents."""
    addresses: tuple[str, ...] = ()
    """Those of the head node; the others try its name first."""
    nodes: tuple[str, ...]
    started: float
    training_started: float | None = None
    first_step: int | None = None
    members: tuple[str, ...] = ()
    """The nodes that train; `nodes` also has spares and lost nodes."""
    restored_step: int | None = None
    """The step from which its ranks last started; None if they have not since the last interruption."""
    interruptions: tuple[PastInterruption, ...] = ()
    """Those that it survived."""
    interrupted_at: float | None = None
    """Time of the last of them."""
    ended: float | None = None
    last_step: int | None = None
    failed_at: float | None = None
    """Time of the failure that ended it."""
    cause: str | None = None
    detail: str | None = None
    signature: str | None = None
    """Of the failure that ended it (hpc.run.causes)."""
    resumed: float | None = None
    """When the user resumed the run after it."""

    @property
    def history(self) -> tuple[PastInterruption, ...]:
        """All its interruptions, and its end."""
        if self.cause is None:
            return self.interruptions
        # With too few nodes left, the last interruption is also the end: it counts once.
        if self.failed_at is not None and self.failed_at == self.interrupted_at:
            *others, last = self.interruptions
            return (*others, replace(last, cause=self.cause, step=self.last_step))
        return (*self.interruptions, self.interrupted_by(self.cause, self.last_step, self.signature))

    def interrupted_by(self, cause: str, step: int | None, signature: str | None) -> PastInterruption:
        """An interruption of the ranks that run now."""
        return PastInterruption(cause=cause, step=step, restored_step=self.restored_step, signature=signature)


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Return all attempts in order, from events in the order of their times."""
    events = list(events)
    # Claims first: with clocks that differ between nodes, events of an attempt may precede its claim.
    found = {
        event.attempt: Attempt(
            attempt=event.attempt, job_id=event.job_id, restart=event.restart, secret=event.secret, port=event.port,
            addresses=event.addresses, nodes=event.nodes, members=event.nodes, started=event.time,
        )
        for event in events if isinstance(event, Claimed)
    }  # fmt: skip
    for event in events:
        if event.attempt in found and (changes := _changes(found[event.attempt], event)):
            found[event.attempt] = replace(found[event.attempt], **changes)
    return [found[number] for number in sorted(found)]


def _changes(attempt: Attempt, event: Event) -> dict[str, Any]:
    """Return what an event changes in its attempt."""
    match event:
        case RoundStarted():
            known = range(len(attempt.nodes))
            return {"members": tuple(attempt.nodes[node_rank] for node_rank in event.members if node_rank in known)}
        case TrainStarted():
            # Ranks may restart within an attempt.
            is_first = attempt.training_started is None
            first = {"training_started": event.time, "first_step": event.step} if is_first else {}
            return {"restored_step": event.step, **first}
        case Interrupted():
            this = attempt.interrupted_by(event.cause, event.step, event.signature)
            return {
                "interruptions": (*attempt.interruptions, this),
                "interrupted_at": event.failed_at,
                "restored_step": None,
            }
        case AttemptEnded():
            return {
                # For a dead attempt, recorded later by another process: the time of its last sign of life.
                "ended": event.last_heard or event.time,
                "failed_at": event.failed_at,
                "cause": event.cause,
                "last_step": event.step,
                "detail": event.detail,
                "signature": event.signature,
            }
        case Resumed():
            return {"resumed": event.time}
    return {}


def budget_of(attempts: Iterable[Attempt]) -> Budget:
    """What a run has used of its budgets since its user has last resumed it.

    Restarts within an attempt and ended attempts both count.
    """
    return budget_after(one for attempt in _since_resumption(attempts) for one in attempt.history)


def _since_resumption(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The attempts after the last one that the user has resumed: a person has looked at those before."""
    counted = list[Attempt]()
    for attempt in attempts:
        counted = [] if attempt.resumed else [*counted, attempt]
    return counted


def budget_now(attempts: Sequence[Attempt]) -> Budget:
    """Return `budget_of`, with the step from which the ranks of a running attempt started as its progress."""
    last = [replace(attempts[-1], cause="")] if attempts and attempts[-1].cause is None else attempts[-1:]
    return budget_of([*attempts[:-1], *last])


def may_restart_after(attempts: Sequence[Attempt]) -> bool:
    """Whether another attempt may follow the last one; one without a recorded end counts as lost."""
    if not _since_resumption(attempts):
        return True
    *earlier, last = attempts
    return budget_of([*earlier, replace(last, cause=last.cause or Cause.LOST)]).may_restart
