"""The attempts of a run, read from its ledger. Pure; runs everywhere."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpc.ledger import Event
from hpc.outcome import Cause


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt: from the claim of its head node's agent to its end. Times are seconds since the epoch."""

    attempt: int
    job_id: str
    restart: int
    nonce: str
    nodes: tuple[str, ...]
    started: float
    trained_from: float | None = None
    first_step: int | None = None
    world_size: int | None = None
    ended: float | None = None
    last_step: int | None = None
    cause: str | None = None
    detail: str | None = None


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """All attempts, the first one first, from events in the order of their times."""
    found: dict[int, Attempt] = {}
    for event in events:
        number = event.get("attempt")
        if event["event"] == "claimed":
            found[event["attempt"]] = _claimed(event)
        elif isinstance(number, int) and number in found and event["event"] in _CHANGES:
            found[number] = replace(found[number], **_CHANGES[event["event"]](event, found[number]))
    return [found[number] for number in sorted(found)]


def _claimed(event: Event) -> Attempt:
    return Attempt(
        attempt=event["attempt"],
        job_id=event["job_id"],
        restart=event["restart"],
        nonce=event["nonce"],
        nodes=tuple(event["nodes"]),
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
        "ended": event.get("last_heard", event["time"]),
        "cause": event["cause"],
        "last_step": event.get("step"),
        "detail": event.get("detail"),
    }


_CHANGES = {"train_started": _started, "attempt_ended": _ended}


def failures_in_a_row(attempts: list[Attempt]) -> int:
    """Crashes at the end of a history since an attempt made a step that none before it had made."""
    best, failures = 0, 0
    for attempt in attempts:
        if (attempt.last_step or 0) > best:
            best, failures = attempt.last_step or 0, 0
        if attempt.cause == Cause.CRASHED:
            failures += 1
    return failures


def steps_lost(attempts: list[Attempt]) -> int:
    """Steps that were trained and had to be trained again, over all attempts."""
    pairs = pairwise(attempts)
    return sum(
        max(0, before.last_step - after.first_step)
        for before, after in pairs
        if before.last_step is not None and after.first_step is not None
    )
