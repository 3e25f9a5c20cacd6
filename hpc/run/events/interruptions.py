"""The cost of a run's interruptions: seconds by part, and lost steps. Pure; runs on the login node.

An interruption is an `interruption` event, which the attempt survived, or the end of an attempt, if another attempt
follows or should follow. The times of events divide the recovery into parts:

| part | from | to |
|---|---|---|
| notice | the failure: `failed_at`, else the lost node's last heartbeat, or the stop signal | the event |
| release | the event | `requeued` or `resubmitted`; 0 where Slurm requeues by itself |
| start | the end of `release` | `claimed` by the next attempt: the wait in the queue and Slurm's start of the job |
| stage | `claimed` | the last `staged` before the training |
| rendezvous | `staged`, or the event inside an attempt | all ranks have started, imported torch and connected |
| restore | connected | `train_started`: the state is restored |
| first_step | `train_started` | `first_step`: the loaders have started, the kernels are chosen |

A script that does not use `state` records no `train_started`. Its `rendezvous` ends with `ranks_started`, and `restore`
is 0: what the script itself records_start is a part of `first_step`.

Inside an attempt nothing is released, started or staged: these parts are 0. The pause before an `hpc resume` belongs to
no part. If an attempt ended without a report, its end is noticed when the next one claims: `notice` then includes the
wait in the queue and Slurm's start of the job. A part is None if one of its times is missing. The total is None, too,
if another interruption follows before the training has started.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import inf
from typing import TypeVar

from hpc.run.events.history import History
from hpc.run.events.kinds import (
    AttemptEnded,
    Claimed,
    DataStaged,
    Event,
    FirstStep,
    Interrupted,
    NodeLost,
    RanksStarted,
    Requeued,
    Resubmitted,
    Resumed,
    Submitted,
    TrainStarted,
    TrainStopped,
)  # fmt: skip

_Kind = TypeVar("_Kind", bound=Event)
PARTS = ("notice", "release", "start", "stage", "rendezvous", "restore", "first_step")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One interruption and its cost. Times are seconds since the epoch."""

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
    """Seconds by part, and `total`: from the failure to the first step or, if none is recorded, to the event before."""
    steps_lost: int | None
    """Steps that had to be recomputed; None before the training has started again, and for a user's script. If the
    training did not start between two interruptions, the later one has the lost steps of both."""
    steps_lost_at_most: int | None = None
    """The steps of a script that reports none, since its ranks had started: it restored a state that is at most as old.
    None if they are not counted, or if `steps_lost` is known."""


def interruptions_of(history: History) -> list[Interruption]:
    """Return all interruptions of a run."""
    interruptions = list[Interruption]()
    last_step = 0
    spans = _time_spans(history)
    for before, after in pairwise([*spans, History()]):
        end = _end_of(before)
        if end is None or (before is spans[-1] and not history.may_restart):
            continue
        last_step = max(last_step, end.step or 0)
        # If the attempt did not survive the interruption after all, the attempt's end is the same interruption.
        next_end = _end_of(after)
        if end.failed_at is not None and isinstance(next_end, AttemptEnded) and next_end.failed_at == end.failed_at:
            continue
        started = _first(after, TrainStarted)
        lost = max(0, last_step - started.step) if started else None
        last_step = 0 if started else last_step
        interruptions.append(_interruption(before, end, after, lost, records_start=history.knows_steps))
    return interruptions


def _time_spans(history: History) -> list[History]:
    """Return the spans into which interruptions divide the attempts. An attempt's last span ends with the attempt."""
    spans, own = list[History](), {attempt.attempt: list[Event]() for attempt in history.attempts}
    for event in history.events:
        if event.attempt in own:
            own[event.attempt].append(event)
    for events in own.values():
        span = list[Event]()
        for event in events:
            span.append(event)
            if isinstance(event, Interrupted):
                spans.append(History(span))
                span = []
        spans.append(History(span))
    return spans


def _first(span: History, kind: type[_Kind]) -> _Kind | None:
    return next(iter(span.of(kind)), None)


def _end_of(span: History) -> Interrupted | AttemptEnded | None:
    ends = [event for event in span.events if isinstance(event, Interrupted | AttemptEnded)]
    return ends[-1] if ends else None


def _time(event: Event | None) -> float | None:
    return event.time if event else None


def _interruption(
    before: History, end: Interrupted | AttemptEnded, after: History, steps_lost: int | None, *, records_start: bool
) -> Interruption:
    """Return the interruption that ends `before`, with its cost until the training starts again in `after`.

    `records_start` is True if the program records `train_started`.
    """
    lost, stopped = before.last(NodeLost), before.last(TrainStopped)
    resumed = _time(before.last(Resumed))
    signalled = stopped.time - stopped.seconds if stopped and stopped.seconds is not None else None
    last_heard = end.last_heard if isinstance(end, AttemptEnded) else None
    moments = (end.failed_at, last_heard, lost.last_heard if lost else None, signalled)
    failed_at = next((seconds for seconds in moments if seconds is not None), None)
    released: float = end.time
    claimed: float | None = released
    staged: float | None = released
    if isinstance(end, AttemptEnded):
        handed_over = [event.time for event in before.events if isinstance(event, Requeued | Resubmitted)]
        released = handed_over[-1] if handed_over else released
        claimed = _time(_first(after, Claimed))
        staged = _time(after.last(DataStaged)) or claimed
    started, connected = _first(after, TrainStarted), None
    trains = _time(started if records_start else _first(after, RanksStarted))
    if not records_start:
        connected = trains
    elif started and started.seconds is not None and started.connect_seconds is not None:
        connected = started.time - started.seconds + started.connect_seconds
    first_step = _time(_first(after, FirstStep))
    # Nothing was to be recovered until the user resumed the run.
    failure, noticed = (failed_at, end.time) if resumed is None else (resumed, resumed)
    return Interruption(
        attempt=end.attempt or 0,
        cause=end.cause,
        recorded_at=end.time,
        failed_at=failed_at,
        step=end.step,
        rank=end.rank,
        node=end.node or (lost.node if lost else None),
        detail=end.detail,
        seconds=_parts([failure, noticed, released, claimed, staged, connected, trains, first_step]),
        steps_lost=steps_lost,
        steps_lost_at_most=None if records_start else end.counted_steps,
    )


def _parts(marks: Sequence[float | None]) -> dict[str, float | None]:
    """Return the seconds of each part, and their total. `marks` are the times at which the parts begin and end."""
    ordered, latest = list[float | None](), inf
    for mark in reversed(marks):
        # A time may be later than the next one: clocks differ, and a dead attempt's end is recorded after a claim.
        latest = latest if mark is None else min(mark, latest)
        ordered.insert(0, None if mark is None else latest)
    parts = dict(zip(PARTS, starmap(_difference, pairwise(ordered)), strict=True))
    trained = ordered[-1] if ordered[-1] is not None else ordered[-2]
    return {**parts, "total": _difference(ordered[0], trained)}


def _difference(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 3)


def steps_lost(interruptions: Iterable[Interruption]) -> int | None:
    """Return the sum of the lost steps that are known; 0 if there are no interruptions, None if no loss is known."""
    costs = [interruption.steps_lost for interruption in interruptions]
    known_costs = [cost for cost in costs if cost is not None]
    return sum(known_costs) if known_costs or not costs else None


def waits_of(history: History, until: float) -> list[tuple[float, float]]:
    """Return when a run had no attempt: from the submission, an attempt's end or `hpc resume` to the next claim.

    A wait that has not ended ends at the time `until`.
    """
    starts = [*(attempt.started for attempt in history.attempts), until]
    submitted = [event.time for event in history.of(Submitted)]
    ends = (attempt.resumed or attempt.ended for attempt in history.attempts)
    begins = [min([*submitted[:1], starts[0]]), *(end or start for end, start in zip(ends, starts[1:], strict=True))]
    return [(min(begin, start), start) for begin, start in zip(begins, starts, strict=True)]


def goodput(train_seconds: float | None, began: float, ended: float) -> float | None:
    """Return the share of a run's time, from `began` to `ended`, that productive steps took; None if unknown."""
    if train_seconds is None or ended <= began:
        return None
    return round(min(1.0, train_seconds / (ended - began)), 4)
