"""Finds the occasions for a message: a run is complete or has failed. Pure."""

from dataclasses import dataclass
from pathlib import Path

from hpc.run.causes import Cause
from hpc.run.events.history import History
from hpc.run.events.kinds import NotificationFailed, NotificationSent, OfMessage, TrainCompleted


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One message about a run."""

    key: str
    """Key of the occasion: all processes that ever see the occasion give it the same key."""
    title: str
    body: str
    time: float


def notice_of(run: Path, history: History, failure: str | None = None) -> Notice | None:
    """Return the notice of a run's completion or failure; None if the run goes on, or its user has cancelled it.

    `failure` is the reason of a failure that no event records.
    """
    if history.outcome in {"completed", "failed"}:
        return _ended(run, history, is_complete=history.outcome == "completed")
    if failure is None:
        return None
    attempt = history.last_attempt.attempt if history.last_attempt else 0
    at = max((event.time for event in history.events if not isinstance(event, OfMessage)), default=0.0)
    body = f"{failure}\n\nhpc logs {run}"
    return Notice(key=f"failed-{attempt:03d}", title=f"Run {run.name} has failed", body=body, time=at)


def unsent_messages(history: History) -> list[dict[str, str | None]]:
    """Return notice, recipient and problem of each unsent message. The problem is None while it is being sent."""
    last = {(event.notice, event.recipient): event for event in history.of(OfMessage)}
    return [
        {"notice": one.notice, "recipient": one.recipient,
         "problem": one.reason if isinstance(one, NotificationFailed) else None}
        for one in last.values() if not isinstance(one, NotificationSent)
    ]  # fmt: skip


def _ended(run: Path, history: History, *, is_complete: bool) -> Notice:
    key, title, verb = ("completed", "is complete", "status") if is_complete else ("failed", "has failed", "logs")
    last = history.attempts[-1]
    lines = [f"Attempt {last.attempt}, job {last.job_id} on {', '.join(last.nodes)}."]
    if last.cause is not None and last.cause != Cause.COMPLETED:
        after = "" if last.last_step is None else f" after step {last.last_step}"
        lines.append(f"It ended{after}: {last.cause}" + (f", {last.detail}" if last.detail else ""))
    if stopped := history.not_continued:
        lines.append(f"Nothing restarts the run ({stopped}): start hpc supervise, or type hpc resume")
    body = "\n".join([*lines, "", f"hpc {verb} {run}"])
    # The agents of a complete run may have been killed before they recorded the end of the attempt.
    at = last.ended or max((event.time for event in history.of(TrainCompleted)), default=0.0)
    return Notice(key=f"{key}-{last.attempt:03d}", title=f"Run {run.name} {title}", body=body, time=at)
