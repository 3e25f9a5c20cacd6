"""What the interruptions of a run cost: time, by its parts, and steps. Pure; runs on the login node.

An interruption is an `interruption` event, which its attempt survived, or the end of an attempt that another one
follows or should follow. The time of its recovery is divided by the times of events:

| part | from | to |
|---|---|---|
| notice | the failure: `failed_at`, else the lost node's last heartbeat, or the stop signal | the event |
| release | the event | `requeued` or `relaunched`; 0 where Slurm requeues by itself |
| start | that | `claimed` by the next attempt: the wait in the queue and Slurm's start of the job |
| stage | `claimed` | the last `staged` before the training |
| rendezvous | `staged`, or the event inside an attempt | all ranks have started, imported torch and connected |
| restore | connected | `train_started`: the state is restored |
| first_step | `train_started` | `first_step`: the loaders have started, the kernels are chosen |

Inside an attempt nothing is released, started or staged: these parts are 0. An attempt that ended without reporting is
noticed by the next one, when it claims: `notice` then includes Slurm's time and the queue's. A part is None where a
time is missing, and so is the total of an interruption that is followed by another one before the training started.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, starmap
from math import inf
from statistics import median

from hpc.core.attempts import attempts_of, failures_in_a_row
from hpc.core.ledger import Event
from hpc.core.outcome import may_restart

PARTS = ("notice", "release", "start", "stage", "rendezvous", "restore", "first_step")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One interruption and what it cost. Times are seconds since the epoch."""

    attempt: int
    cause: str
    recorded_at: float
    failed_at: float | None
    step: int | None
    """The last step that any rank had done."""
    rank: int | None
    node: str | None
    detail: str | None
    seconds: Mapping[str, float | None]
    """By part, and `total`: from the failure to the first step, or to `train_started` where that is not recorded."""
    steps_lost: int
    """Steps that had to be recomputed."""


@dataclass(frozen=True, kw_only=True)
class TimeSpan:
    """The events of one attempt from its start or an interruption to the next one, or its end."""

    events: Sequence[Event]

    def first(self, kind: str) -> Event | None:
        """The first event of a kind."""
        return next((event for event in self.events if event["event"] == kind), None)

    def last(self, *kinds: str) -> Event | None:
        """The last event of some kinds."""
        return next((event for event in reversed(self.events) if event["event"] in kinds), None)

    @property
    def end(self) -> Event | None:
        """The event that records its end, if it has ended."""
        return self.last("interruption", "attempt_ended")


def interruptions_of(events: Sequence[Event]) -> list[Interruption]:
    """All interruptions of a run, from its events in the order of their times."""
    found, last_step = list[Interruption](), 0
    for before, after in pairwise([*_time_spans(events), None]):
        end = before.end if before else None
        if before is None or end is None or (after is None and not _may_restart(events, end)):
            continue
        # Of two interruptions without a start of the ranks in between, the later one has the lost steps of both.
        last_step = max(last_step, end.get("step") or 0)
        if after and _ended_attempt(end, after):
            continue
        started = after.first("train_started") if after else None
        lost = max(0, last_step - started["step"]) if started else 0
        last_step = 0 if started else last_step
        found.append(_interruption(before, end, after, steps_lost=lost))
    return found


def _time_spans(events: Iterable[Event]) -> list[TimeSpan]:
    """The attempts, divided after each interruption."""
    claimed = {event["attempt"] for event in events if event["event"] == "claimed"}
    own = sorted((event for event in events if event.get("attempt") in claimed), key=lambda event: event["attempt"])
    spans = []
    for _, group in groupby(own, key=lambda event: event["attempt"]):
        pieces: list[list[Event]] = [[]]
        for event in group:
            pieces[-1].append(event)
            if event["event"] == "interruption":
                pieces.append([])
        spans += [TimeSpan(events=piece) for piece in pieces]
    return spans


def _ended_attempt(interruption: Event, after: TimeSpan) -> bool:
    """Whether the attempt did not survive the interruption after all: then its end is no second one."""
    end, failed_at = after.end or {}, interruption.get("failed_at")
    return failed_at is not None and end.get("event") == "attempt_ended" and end.get("failed_at") == failed_at


def _may_restart(events: Sequence[Event], end: Event) -> bool:
    return end["event"] == "interruption" or may_restart(end["cause"], failures_in_a_row(attempts_of(events)))


def _interruption(before: TimeSpan, end: Event, after: TimeSpan | None, *, steps_lost: int) -> Interruption:
    lost = before.last("node_lost") or {}
    failed_at = _failed_at(before, end)
    return Interruption(
        attempt=end["attempt"],
        cause=end["cause"],
        recorded_at=end["time"],
        failed_at=failed_at,
        step=end.get("step"),
        rank=end.get("rank"),
        node=end.get("node") or lost.get("node"),
        detail=end.get("detail"),
        seconds=_parts(failed_at, before, end, after or TimeSpan(events=())),
        steps_lost=steps_lost,
    )


def _failed_at(before: TimeSpan, end: Event) -> float | None:
    """When the training was interrupted, as far as events record it."""
    lost, stopped = before.last("node_lost") or {}, before.last("train_stopped") or {}
    signalled = stopped["time"] - stopped["seconds"] if "seconds" in stopped else None
    known = (end.get("failed_at"), end.get("last_heard"), lost.get("last_heard"), signalled)
    return next((seconds for seconds in known if seconds is not None), None)


def _parts(failed_at: float | None, before: TimeSpan, end: Event, after: TimeSpan) -> dict[str, float | None]:
    """The parts of the recovery, in seconds, and their total."""
    started = after.first("train_started")
    inside = end["event"] == "interruption"
    released: float = end["time"]
    claimed: float | None = released
    staged: float | None = released
    if not inside:
        released = _time(before.last("requeued", "relaunched")) or released
        claimed = _time(after.first("claimed"))
        staged = _time(after.last("staged")) or claimed
    connected = None
    if started and "connect_seconds" in started:
        connected = started["time"] - started["seconds"] + started["connect_seconds"]
    first = _time(after.first("first_step"))
    return _differences([failed_at, end["time"], released, claimed, staged, connected, _time(started), first])


def _time(event: Event | None) -> float | None:
    return event["time"] if event else None


def _differences(marks: Sequence[float | None]) -> dict[str, float | None]:
    """Durations between n + 1 timestamps, and their total."""
    ordered, latest = list[float | None](), inf
    for mark in reversed(marks):
        # The next attempt records a dead one's end after its own claim, and clocks differ.
        latest = latest if mark is None else min(mark, latest)
        ordered.insert(0, None if mark is None else latest)
    parts = dict(zip(PARTS, starmap(_difference, pairwise(ordered)), strict=True))
    trained = ordered[-1] if ordered[-1] is not None else ordered[-2]
    return {**parts, "total": _difference(ordered[0], trained)}


def _difference(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 3)


def recovery_by_cause(interruptions: Iterable[Interruption]) -> dict[str, dict[str, float | None]]:
    """For each cause: the number of interruptions, the median of their known totals in seconds, the steps lost."""
    found: dict[str, list[Interruption]] = {}
    for interruption in interruptions:
        found.setdefault(interruption.cause, []).append(interruption)
    return {cause: _recovery(same) for cause, same in found.items()}


def _recovery(interruptions: Sequence[Interruption]) -> dict[str, float | None]:
    totals = [interruption.seconds["total"] for interruption in interruptions]
    known = [seconds for seconds in totals if seconds is not None]
    return {
        "count": len(interruptions),
        "median_seconds": round(median(known), 3) if known else None,
        "steps_lost": sum(interruption.steps_lost for interruption in interruptions),
    }


def goodput(train_seconds: float | None, began: float, ended: float) -> float | None:
    """The share of a run's time that went into productive steps.

    Args:
        train_seconds: the time in productive steps; None where it is not recorded.
        began: when the first attempt was claimed.
        ended: when the run ended, or now.
    """
    if train_seconds is None or ended <= began:
        return None
    return round(min(1.0, train_seconds / (ended - began)), 4)
