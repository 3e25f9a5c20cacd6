"""The attempts of a run, read from its ledger. Pure; runs everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.core.ledger import Event
from hpc.core.outcome import Cause, count_failures, may_restart


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: from the claim of its head node's agent to its end. Times are seconds since the epoch."""

    attempt: int
    job_id: str
    restart: int
    nonce: str
    port: int
    """Where its head node's agent listens to the others."""
    nodes: tuple[str, ...]
    started: float
    trained_from: float | None = None
    first_step: int | None = None
    world_size: int | None = None
    members: tuple[str, ...] = ()
    """The nodes that train; `nodes` has the spares and the lost ones too."""
    interruptions: tuple[tuple[str, int | None], ...] = ()
    """The interruptions inside it, each with the last step that had been done by then."""
    interrupted_at: float | None = None
    """When the last of them happened."""
    ended: float | None = None
    last_step: int | None = None
    failed: float | None = None
    """When what ended it happened."""
    cause: str | None = None
    detail: str | None = None

    @property
    def all_interruptions(self) -> tuple[tuple[str, int | None], ...]:
        """What interrupted and what ended it, each with the last step that had been done by then."""
        if self.cause is None:
            return self.interruptions
        # It did not survive the last interruption after all: too few nodes were left to go on.
        same = self.failed is not None and self.failed == self.interrupted_at
        return (*(self.interruptions[:-1] if same else self.interruptions), (self.cause, self.last_step))


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """All attempts, the first one first, from events in the order of their times."""
    events = list(events)
    # First the claims: by the clock of another node, what followed one may have come before it.
    found = {event["attempt"]: _claimed(event) for event in events if event["event"] == "claimed"}
    for event in events:
        change, number = _CHANGES.get(event["event"]), event.get("attempt")
        if change and isinstance(number, int) and number in found:
            found[number] = replace(found[number], **change(event, found[number]))
    return [found[number] for number in sorted(found)]


def _claimed(event: Event) -> Attempt:
    return Attempt(
        attempt=event["attempt"],
        job_id=event["job_id"],
        restart=event["restart"],
        nonce=event["nonce"],
        port=event.get("port", 0),
        nodes=tuple(event["nodes"]),
        members=tuple(event["nodes"]),
        started=event["time"],
    )


def _started(event: Event, attempt: Attempt) -> dict[str, Any]:
    # The ranks may restart inside one attempt: what it began with is what the first start had.
    first = attempt.trained_from is None
    return {
        "trained_from": event["time"] if first else attempt.trained_from,
        "first_step": event["step"] if first else attempt.first_step,
        "world_size": event["world_size"],
    }


def _ended(event: Event, _attempt: Attempt) -> dict[str, Any]:
    return {
        # What is written about a dead attempt later says when it was last heard of.
        "ended": event.get("last_heard") or event["time"],
        "failed": event.get("failed_at"),
        "cause": event["cause"],
        "last_step": event.get("step"),
        "detail": event.get("detail"),
    }


def _regrouped(event: Event, attempt: Attempt) -> dict[str, Any]:
    members = event.get("members", range(len(attempt.nodes)))
    return {"members": tuple(attempt.nodes[node_rank] for node_rank in members)}


def _interrupted(event: Event, attempt: Attempt) -> dict[str, Any]:
    return {
        "interruptions": (*attempt.interruptions, (event["cause"], event.get("step"))),
        "interrupted_at": event.get("failed_at"),
    }


_CHANGES = {
    "rendezvous": _regrouped,
    "train_started": _started,
    "interruption": _interrupted,
    "attempt_ended": _ended,
}


def last_job_id(events: Iterable[Event]) -> str | None:
    """The job that Slurm was given last for a run."""
    kinds = {"submitted", "claimed", "requeued", "relaunched"}
    return next((event["job_id"] for event in reversed(list(events)) if event["event"] in kinds), None)


def failures_in_a_row(attempts: Iterable[Attempt]) -> int:
    """Failures in a row at the end of a history: of ranks that were restarted in place, and of whole attempts."""
    return count_failures(interruption for attempt in attempts for interruption in attempt.all_interruptions)


def may_restart_after(attempts: Sequence[Attempt]) -> bool:
    """Whether another attempt is to follow the last one; what left no word is lost."""
    return not attempts or may_restart(attempts[-1].cause or Cause.LOST, failures_in_a_row(attempts))
