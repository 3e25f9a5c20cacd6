"""The attempts of a run, derived from its ledger. Pure; runs everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpc.core.causes import FINAL_CAUSES, Budget, Cause, PastInterruption, budget_after
from hpc.core.ledger import Event
from hpc.core.resumption import is_cancelled

Outcome = Literal["completed", "failed", "cancelled"]
"""How a run has ended."""


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
    """Of the failure that ended it (hpc.core.causes)."""
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
    """All attempts in order, from events in the order of their times."""
    events = list(events)
    # Claims first: with clocks that differ between nodes, events of an attempt may precede its claim.
    found = {
        event["attempt"]: Attempt(
            attempt=event["attempt"], job_id=event["job_id"], restart=event["restart"], secret=event["secret"],
            port=event.get("port", 0), addresses=tuple(event.get("addresses", ())), nodes=tuple(event["nodes"]),
            members=tuple(event["nodes"]), started=event["time"],
        )
        for event in events if event["event"] == "claimed"
    }  # fmt: skip
    for event in events:
        number = event.get("attempt")
        if number in found and (changes := _changes(found[number], event)):
            found[number] = replace(found[number], **changes)
    return [found[number] for number in sorted(found)]


def _changes(attempt: Attempt, event: Event) -> dict[str, Any]:
    """What an event changes in its attempt."""
    match event["event"]:
        case "rendezvous":
            known = range(len(attempt.nodes))
            return {"members": tuple(attempt.nodes[node_rank] for node_rank in event["members"] if node_rank in known)}
        case "train_started":
            # Ranks may restart within an attempt.
            is_first = attempt.training_started is None
            first = {"training_started": event["time"], "first_step": event["step"]} if is_first else {}
            return {"restored_step": event["step"], **first}
        case "interruption":
            this = attempt.interrupted_by(event["cause"], event.get("step"), event.get("signature"))
            interruptions = (*attempt.interruptions, this)
            return {
                "interruptions": interruptions,
                "interrupted_at": event.get("failed_at"),
                "restored_step": None,
            }
        case "attempt_ended":
            return {
                # For a dead attempt, recorded later by another process: the time of its last sign of life.
                "ended": event.get("last_heard") or event["time"],
                "failed_at": event.get("failed_at"),
                "cause": event["cause"],
                "last_step": event.get("step"),
                "detail": event.get("detail"),
                "signature": event.get("signature"),
            }
        case "resumed":
            return {"resumed": event["time"]}
    return {}


def lost_nodes(events: Iterable[Event]) -> list[str]:
    """The nodes that are lost, once for each agent that has reported it."""
    lost = list[str]()
    for event in events:
        if event["event"] == "node_lost":
            lost.append(event["node"])
        elif event["event"] == "node_returned":
            lost = [node for node in lost if node != event["node"]]
    return lost


def last_job_id(events: Iterable[Event]) -> str | None:
    """The id of the run's newest job."""
    # By attempt, and only then by time: clocks are set, and differ between nodes.
    order = {"submitted": 0, "claimed": 1, "requeued": 2, "resubmitted": 2}
    starts = (event for event in events if event["event"] in order)
    newest = sorted(starts, key=lambda event: (event.get("attempt", 0), order[event["event"]]))[-1:]
    return next((event["job_id"] for event in newest), None)


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
    """The same, with what is known of an attempt that has not ended: the step from which its ranks started."""
    last = [replace(attempts[-1], cause="")] if attempts and attempts[-1].cause is None else attempts[-1:]
    return budget_of([*attempts[:-1], *last])


def may_restart_after(attempts: Sequence[Attempt]) -> bool:
    """Whether another attempt may follow the last one; one without a recorded end counts as lost."""
    if not _since_resumption(attempts):
        return True
    *earlier, last = attempts
    return budget_of([*earlier, replace(last, cause=last.cause or Cause.LOST)]).may_restart


def outcome_of(attempts: Sequence[Attempt], events: Iterable[Event]) -> Outcome | None:
    """How the run has ended, as far as its events say so; None if it goes on."""
    events, last = list(events), attempts[-1] if attempts else None
    if is_cancelled(events):
        return "cancelled"
    if last is None or last.cause is None or last.resumed:
        return None
    if last.cause == Cause.COMPLETED:
        return "completed"
    stopped = not_continued(last, events) is not None or not may_restart_after(attempts)
    return "failed" if last.cause not in FINAL_CAUSES and stopped else None


def not_continued(attempt: Attempt, events: Iterable[Event]) -> str | None:
    """Why no job could be started after an attempt; None: one could, or should not."""
    own = (each for each in events if each["event"] == "not_continued" and each["attempt"] == attempt.attempt)
    return next((str(each["detail"]) for each in own), None)
