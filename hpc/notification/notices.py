"""What is worth a message: a run is complete, has failed, or is interrupted again and again. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.core.attempts import Attempt, attempts_of, not_continued, outcome_of
from hpc.core.causes import FINAL_CAUSES, Cause
from hpc.core.ledger import Event

_HOUR_SECONDS = 3600.0
COMPLETED, FAILED, INTERRUPTED = "completed", "failed", "interrupted"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One message about a run."""

    key: str
    """The same for all who see the same thing, in all of a run's life."""
    title: str
    body: str
    time: float
    """When it happened."""


def notices_of(run: Path, events: Sequence[Event], interruptions: int) -> list[Notice]:
    """All that is to be told of a run until now; `interruptions` are as many within an hour as are not."""
    attempts = attempts_of(events)
    end = _end_of(attempts, events)
    found = [_ended(run, *end, events)] if end else []
    causes = _interruptions(events, failed=end is not None and end[0] == FAILED)
    for number, at in enumerate(alert_times(causes, interruptions), start=1):
        recent = [cause for when, cause in causes.items() if at - _HOUR_SECONDS < when <= at][-interruptions - 1 :]
        times = f" {len(recent)} times within an hour" if interruptions else ""
        why = f"Causes, the newest last: {', '.join(recent)}"
        title, body = f"Run {run.name} was interrupted{times}", _body(run, attempts, "status", [why])
        found.append(Notice(key=f"{INTERRUPTED}-{number:03d}", title=title, body=body, time=at))
    return found


def failure_notice(run: Path, attempt: int, reason: str, at: float) -> Notice:
    """The message that a run has failed, from one who knows this from elsewhere than the events."""
    return Notice(
        key=f"{FAILED}-{attempt:03d}", title=f"Run {run.name} has failed", time=at,
        body=f"{reason}\n\n{_next(run, 'logs')}",
    )  # fmt: skip


def unsent_messages(events: Iterable[Event]) -> list[dict[str, str | None]]:
    """The messages that are being sent, or that nobody could send yet: notice, recipient, and the problem, if any."""
    last = {(event["notice"], event["recipient"]): event for event in events if "notice" in event}
    return [
        {"notice": notice, "recipient": recipient, "problem": event.get("reason")}
        for (notice, recipient), event in last.items()
        if event["event"] != "notification_sent"
    ]


def alert_times(times: Iterable[float], most: int) -> list[float]:
    """When there were more than `most` interruptions within an hour. No interruption counts for two alerts."""
    recent, alerts = list[float](), list[float]()
    for at in times:
        recent = [*(each for each in recent if at - each < _HOUR_SECONDS), at]
        if len(recent) > most:
            alerts.append(at)
            recent = []
    return alerts


def _end_of(attempts: Sequence[Attempt], events: Iterable[Event]) -> tuple[str, Attempt] | None:
    """How the run has ended, and its last attempt; None if it goes on, or if its user has ended it."""
    outcome = outcome_of(attempts, events)
    return None if outcome in {None, "cancelled"} else (str(outcome), attempts[-1])


def _not_continued(last: Attempt, events: Iterable[Event]) -> str | None:
    """Why no next attempt could be started, and what to do; None: it could, or should not be."""
    detail = not_continued(last, events)
    return None if detail is None else f"Nothing restarts the run ({detail}): start hpc supervise, or type hpc resume"


def _interruptions(events: Sequence[Event], *, failed: bool) -> dict[float, str]:
    """When the run was interrupted, in order, and why; not by the failure that ended it."""
    stops = [
        event
        for event in events
        if event["event"] == "interruption"
        or (event["event"] == "attempt_ended" and event.get("cause") not in FINAL_CAUSES)
    ]
    # The last interruption of an attempt may also be its end.
    causes = {event.get("failed_at") or event["time"]: str(event["cause"]) for event in stops}
    return {at: causes[at] for at in sorted(causes)[: -1 if failed else None]}


def _ended(run: Path, how: str, last: Attempt, events: Iterable[Event]) -> Notice:
    title = f"Run {run.name} is complete" if how == COMPLETED else f"Run {run.name} has failed"
    stop = _not_continued(last, events)
    return Notice(
        key=f"{how}-{last.attempt:03d}", title=title, time=last.ended or 0.0,
        body=_body(run, [last], "status" if how == COMPLETED else "logs", [stop] if stop else []),
    )  # fmt: skip


def _body(run: Path, attempts: Sequence[Attempt], verb: str, more: Sequence[str] = ()) -> str:
    """What is known of the last attempt, and what to type."""
    last = attempts[-1]
    lines = [f"Attempt {last.attempt}, job {last.job_id} on {', '.join(last.nodes)}."]
    if last.cause is not None and last.cause != Cause.COMPLETED:
        after = "" if last.last_step is None else f" after step {last.last_step}"
        lines.append(f"It ended{after}: {last.cause}" + (f", {last.detail}" if last.detail else ""))
    return "\n".join([*lines, *more, "", _next(run, verb)])


def _next(run: Path, verb: str) -> str:
    return f"hpc {verb} {run}"
