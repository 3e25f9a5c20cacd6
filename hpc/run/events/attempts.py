"""The attempts of a run, from its events. Pure; runs everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.run.causes import Cause
from hpc.run.events.kinds import (
    AttemptEnded,
    Claimed,
    Event,
    Interrupted,
    RanksStarted,
    Resumed,
    RoundStarted,
    TrainStarted,
)  # fmt: skip
from hpc.run.restart_budget import Budget, PastInterruption, budget_after


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt, from the claim of its first node's agent to its end. Times are seconds since the epoch."""

    attempt: int
    job_id: str
    restart: int
    secret: str
    port: int
    """The port on which the first node's agent listens to the other agents."""
    addresses: tuple[str, ...] = ()
    """The addresses of the first node, which the other agents try after its name."""
    nodes: tuple[str, ...]
    started: float
    start_once: bool = False
    """Whether the ranks may start only once (--start-once)."""
    first_step: int | None = None
    members: tuple[str, ...] = ()
    """The nodes that train; `nodes` also has spares and lost nodes."""
    world_size: int | None = None
    """The number of ranks; None until all have started, also after an interruption and after the end."""
    restored_step: int | None = None
    """The step from which the ranks last started; None if they have not started since the last interruption."""
    interruptions: tuple[PastInterruption, ...] = ()
    """The interruptions that the attempt survived."""
    interrupted_at: float | None = None
    """Time of the failure that caused the last interruption."""
    ranks_started: float | None = None
    """Time at which the current round began, or of the last interruption if no round has begun since."""
    ended: float | None = None
    last_step: int | None = None
    counted_steps: int | None = None
    """Steps that the ranks of a script had done since their last start, if the attempt has ended; None if unknown."""
    failed_at: float | None = None
    """Time of the failure that ended the attempt."""
    cause: str | None = None
    detail: str | None = None
    signature: str | None = None
    """The signature of the failure that ended the attempt (hpc.run.restart_budget)."""
    resumed: float | None = None
    """Time at which the user resumed the run after this attempt."""

    @property
    def job_start(self) -> tuple[str, int]:
        """Identity of the start of the job that made the attempt: job id and number of restarts."""
        return self.job_id, self.restart

    @property
    def history(self) -> tuple[PastInterruption, ...]:
        """All interruptions of the attempt and, if it has ended, its end."""
        if self.cause is None:
            return self.interruptions
        # If too few nodes were left, the last interruption is also the end of the attempt, and counts once.
        if self.failed_at is not None and self.failed_at == self.interrupted_at:
            *others, last = self.interruptions
            return (*others, replace(last, cause=self.cause, step=self.last_step))
        at = self.failed_at or self.ended
        return (*self.interruptions, self.interrupted_by(self.cause, self.last_step, self.signature, at))

    def interrupted_by(self, cause: str, step: int | None, signature: str | None, at: float | None) -> PastInterruption:
        """Return an interruption of the current ranks by a failure at the time `at`, which is None if unknown."""
        ran_seconds = at - self.ranks_started if at and self.ranks_started else 0.0
        return PastInterruption(
            cause=cause, step=step, restored_step=self.restored_step, signature=signature, ran_seconds=ran_seconds
        )


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Return all attempts in order, from events in the order of their times."""
    events = list(events)
    # Claims come first: if clocks differ between nodes, events of an attempt may precede its claim.
    attempts = {
        event.attempt: Attempt(
            attempt=event.attempt, job_id=event.job_id, restart=event.restart, secret=event.secret, port=event.port,
            addresses=event.addresses, nodes=event.nodes, members=event.nodes, started=event.time,
            start_once=event.start_once,
        )
        for event in events if isinstance(event, Claimed)
    }  # fmt: skip
    for event in events:
        if event.attempt in attempts and (changes := _changes(attempts[event.attempt], event)):
            attempts[event.attempt] = replace(attempts[event.attempt], **changes)
    return [attempts[number] for number in sorted(attempts)]


def _changes(attempt: Attempt, event: Event) -> dict[str, Any]:
    match event:
        case RoundStarted():
            claimed = range(len(attempt.nodes))
            members = tuple(attempt.nodes[node_rank] for node_rank in event.members if node_rank in claimed)
            return {"members": members, "ranks_started": event.time, "world_size": None}
        case RanksStarted():
            return {"world_size": event.world_size}
        case TrainStarted():
            # Ranks may restart within an attempt: the first start counts.
            first_step = event.step if attempt.first_step is None else attempt.first_step
            return {"restored_step": event.step, "first_step": first_step}
        case Interrupted():
            this = attempt.interrupted_by(event.cause, event.step, event.signature, event.failed_at)
            return {
                "interruptions": (*attempt.interruptions, this),
                "interrupted_at": event.failed_at,
                "restored_step": None,
                "ranks_started": event.time,
                "world_size": None,
            }
        case AttemptEnded():
            return {
                # Another process records the end of a dead attempt later, so the last sign of life counts.
                "ended": event.last_heard or event.time,
                "failed_at": event.failed_at,
                "cause": event.cause,
                "last_step": event.step,
                "counted_steps": event.counted_steps,
                "detail": event.detail,
                "signature": event.signature,
                "world_size": None,
            }
    return {"resumed": event.time} if isinstance(event, Resumed) else {}


def budget_of(attempts: Iterable[Attempt]) -> Budget:
    """Return the budget of a run since its user last resumed it. Interruptions and ends of attempts both count."""
    counted = _since_resumption(attempts)
    budget = budget_after(one for attempt in counted for one in attempt.history)
    return replace(budget, start_once=any(attempt.start_once for attempt in counted))


def _since_resumption(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts since the last `hpc resume`. Earlier failures do not count: a person has looked at them."""
    counted = list[Attempt]()
    for attempt in attempts:
        counted = [] if attempt.resumed else [*counted, attempt]
    return counted


def budget_now(attempts: Sequence[Attempt]) -> Budget:
    """Return what `budget_of` returns, but count the step from which a running attempt's ranks started as progress."""
    last = [replace(attempts[-1], cause="")] if attempts and attempts[-1].cause is None else attempts[-1:]
    return budget_of([*attempts[:-1], *last])


def may_restart_after(attempts: Sequence[Attempt]) -> bool:
    """Return whether another attempt may follow the last one. A last attempt without a recorded end counts as lost."""
    if not _since_resumption(attempts):
        return True
    *earlier, last = attempts
    return budget_of([*earlier, replace(last, cause=last.cause or Cause.LOST)]).may_restart
