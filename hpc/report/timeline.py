"""What a run did when, from its submission to its end, and what its GPUs did meanwhile. Pure; runs on the login node.

The periods follow each other without a gap:

| period | from | to |
|---|---|---|
| queue | the submission; the requeue or the new job | the next attempt's claim |
| startup | the first claim | the first step |
| training | a first step | the next failure, or the end; evaluating and saving are parts of it |
| recovery | a failure | the first step after it, without the queue |

GPU-hours count all GPUs of an attempt's nodes, spares included, from its claim to its end:

| part | of the GPUs |
|---|---|
| productive | those of the ranks, in steps that count |
| recomputed | the same, in steps that an interruption discarded: their number times the mean time of a step |
| recovering | all, in recoveries |
| waiting | all, in the startup; spares, while the ranks train |
| evaluating and saving | the rest |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal

import pandas as pd

from hpc.core.attempts import Attempt, attempts_of
from hpc.core.ledger import Event

Kind = Literal["queue", "startup", "training", "recovery"]
PARTS = ("productive", "recomputed", "recovering", "waiting", "evaluating and saving")


@dataclass(frozen=True, kw_only=True)
class Period:
    """A part of a run's time. Times are seconds since the epoch."""

    kind: Kind
    began: float
    ended: float
    interruption: int | None = None
    """Of a recovery and the queue within it: the number of the interruption, from 1."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began


def periods_of(
    events: Sequence[Event], interruptions: Sequence[Mapping[str, Any]], until: float, *, own_script: bool
) -> list[Period]:
    """The periods of a run until its end, or now. A user's script does not tell when it trains: it has no startup."""
    submitted = [event["time"] for event in events if event["event"] == "submitted"]
    starts = [attempt.started for attempt in attempts_of(events)]
    began, claimed = [*submitted, *starts, until][0], [*starts, until][0]
    first_step = next((event["time"] for event in events if event["event"] == "first_step"), until)
    # Of those that overlap the first counts.
    spans = [
        Period(kind="queue", began=began, ended=claimed),
        *_down(events, interruptions, until, own_script=own_script),
        Period(kind="startup", began=claimed, ended=claimed if own_script else first_step),
        Period(kind="training", began=began, ended=until),
    ]
    edges = {min(max(edge, began), until) for span in spans for edge in (span.began, span.ended)}
    return [
        replace(next(span for span in spans if span.began <= start and end <= span.ended), began=start, ended=end)
        for start, end in pairwise(sorted(edges))
    ]


def _down(
    events: Sequence[Event], interruptions: Sequence[Mapping[str, Any]], until: float, *, own_script: bool
) -> list[Period]:
    """The recoveries, and before them what they spent in the queue."""
    queues, recoveries, attempts = list[Period](), list[Period](), attempts_of(events)
    failures = [one["failed_at"] or one["recorded_at"] for one in interruptions]
    for number, (one, failed) in enumerate(zip(interruptions, failures, strict=True), 1):
        seconds, next_start = one["seconds"], until
        ends_attempt = seconds["start"] != 0
        if ends_attempt:
            next_start = next((each.started for each in attempts if each.attempt > one["attempt"]), until)
            queued = one["recorded_at"] + (seconds["release"] or 0.0)
            queues.append(Period(kind="queue", began=queued, ended=next_start, interruption=number))
        if seconds["total"] is not None:
            ended = failed + seconds["total"]
        elif own_script:
            ended = next_start if ends_attempt else failed
        else:
            ended = [*failures[number:], until][0]
        recoveries.append(Period(kind="recovery", began=failed, ended=ended, interruption=number))
    return [*queues, *recoveries]


def gpu_hours(
    events: Sequence[Event],
    periods: Sequence[Period],
    train: pd.DataFrame,
    gpus_per_node: int,
    steps_lost: int | None,
) -> dict[str, float]:
    """GPU-hours by part; empty before the first attempt. What a user's script does between failures is productive."""
    found, trained = dict.fromkeys(PARTS, 0.0), 0.0
    for period, attempt in product(periods, attempts_of(events)):
        seconds = min(period.ended, attempt.ended or period.ended) - max(period.began, attempt.started)
        if seconds <= 0:
            continue
        allocated = seconds * len(attempt.nodes) * gpus_per_node
        if period.kind == "training":
            used = min(allocated, seconds * _ranks(events, attempt, period.began, gpus_per_node))
            trained += used
            found["waiting"] += allocated - used
        else:
            found["recovering" if period.kind == "recovery" else "waiting"] += allocated
    productive, steps = _productive_seconds(train), train["step"].max()
    found["productive"] = trained if productive is None else min(trained, productive)
    if productive is not None:
        found["recomputed"] = min(trained - found["productive"], found["productive"] / steps * (steps_lost or 0))
        found["evaluating and saving"] = trained - found["productive"] - found["recomputed"]
    return {part: seconds / 3600 for part, seconds in found.items() if seconds > 0}


def _productive_seconds(train: pd.DataFrame) -> float | None:
    """The GPU-seconds of all steps that count; None if they are not recorded."""
    # A column that grows from line to line, with one GPU for each of the ranks of that line.
    known = train[train["train_seconds"].notna()]
    seconds = known["train_seconds"].diff().fillna(known["train_seconds"])
    return None if known.empty else float((seconds * known["world_size"]).sum())


def _ranks(events: Sequence[Event], attempt: Attempt, time: float, gpus_per_node: int) -> int:
    """How many ranks trained from this time on, one per GPU; those of the attempt's members where none said so."""
    sizes = [
        event["world_size"]
        for event in events
        if event["event"] == "train_started" and event["attempt"] == attempt.attempt and event["time"] <= time
    ]
    return int(sizes[-1]) if sizes else len(attempt.members) * gpus_per_node
