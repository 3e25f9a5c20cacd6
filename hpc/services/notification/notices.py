"""Finds the occasions for a message: a run is complete, has failed, or is interrupted too often. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc.run.budget import FINAL_CAUSES
from hpc.run.causes import Cause
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import (
    AttemptEnded,
    Interrupted,
    NotificationFailed,
    NotificationSent,
    OfMessage,
    TrainCompleted,
)

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One message about a run."""

    key: str
    """Key of the occasion: all processes that ever see the occasion give it the same key."""
    title: str
    body: str
    time: float


def notices_of(run: Path, history: History, interruptions: int, failure: str | None = None) -> list[Notice]:
    """Return the notices of a run's completion or failure, and of over `interruptions` interruptions in an hour.

    `failure` is the reason of a failure that no event records.
    """
    outcome, found = history.outcome, list[Notice]()
    if outcome in {"completed", "failed"}:
        found.append(_ended(run, history, is_complete=outcome == "completed"))
    elif failure is not None:
        attempt = history.last_attempt.attempt if history.last_attempt else 0
        at = max((event.time for event in history.events if not isinstance(event, OfMessage)), default=0.0)
        body = f"{failure}\n\nhpc logs {run}"
        found.append(Notice(key=f"failed-{attempt:03d}", title=f"Run {run.name} has failed", body=body, time=at))
    causes = _interruptions(history, failed=outcome == "failed")
    for number, at in enumerate(alert_times(causes, interruptions), start=1):
        recent = [cause for when, cause in causes.items() if at - _HOUR_SECONDS < when <= at][-interruptions - 1 :]
        times = f" {len(recent)} times within an hour" if interruptions else ""
        why = f"Causes, the newest last: {', '.join(recent)}"
        title, body = f"Run {run.name} was interrupted{times}", _body(run, history.attempts[-1], "status", why)
        found.append(Notice(key=f"interrupted-{number:03d}", title=title, body=body, time=at))
    return found


def unsent_messages(history: History) -> list[dict[str, str | None]]:
    """Return notice, recipient and problem of each unsent message. The problem is None while it is being sent."""
    last = {(event.notice, event.recipient): event for event in history.of(OfMessage)}
    return [
        {"notice": one.notice, "recipient": one.recipient,
         "problem": one.reason if isinstance(one, NotificationFailed) else None}
        for one in last.values() if not isinstance(one, NotificationSent)
    ]  # fmt: skip


def alert_times(times: Iterable[float], most: int) -> list[float]:
    """Return when alerts are due: when an hour has more than `most` interruptions. Each interruption counts once."""
    recent, alerts = list[float](), list[float]()
    for at in times:
        recent = [*(before for before in recent if at - before < _HOUR_SECONDS), at]
        if len(recent) > most:
            alerts.append(at)
            recent = []
    return alerts


def _interruptions(history: History, *, failed: bool) -> dict[float, str]:
    """Return the causes of a run's interruptions by time, in order. If the run has `failed`, leave out the last one."""
    # The last interruption of an attempt may also be the attempt's end: both have the same time, and count once.
    causes = {
        event.failed_at or event.time: event.cause
        for event in history.events
        if isinstance(event, Interrupted) or (isinstance(event, AttemptEnded) and event.cause not in FINAL_CAUSES)
    }
    return {at: causes[at] for at in sorted(causes)[: -1 if failed else None]}


def _ended(run: Path, history: History, *, is_complete: bool) -> Notice:
    key, title, verb = ("completed", "is complete", "status") if is_complete else ("failed", "has failed", "logs")
    last, stopped = history.attempts[-1], history.not_continued
    advice = [f"Nothing restarts the run ({stopped}): start hpc supervise, or type hpc resume"] if stopped else []
    # The agents of a complete run may have been killed before they recorded the end of the attempt.
    at = last.ended or max((event.time for event in history.of(TrainCompleted)), default=0.0)
    body = _body(run, last, verb, *advice)
    return Notice(key=f"{key}-{last.attempt:03d}", title=f"Run {run.name} {title}", body=body, time=at)


def _body(run: Path, last: Attempt, verb: str, *more: str) -> str:
    """Return the text of a message: the last attempt, the lines of `more`, and the command to type."""
    lines = [f"Attempt {last.attempt}, job {last.job_id} on {', '.join(last.nodes)}."]
    if last.cause is not None and last.cause != Cause.COMPLETED:
        after = "" if last.last_step is None else f" after step {last.last_step}"
        lines.append(f"It ended{after}: {last.cause}" + (f", {last.detail}" if last.detail else ""))
    return "\n".join([*lines, *more, "", f"hpc {verb} {run}"])
