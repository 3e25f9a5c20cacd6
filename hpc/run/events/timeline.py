"""The periods of a run from its submission to its end, and the use of its GPUs in them. Pure; runs on the login node.

The periods follow each other without a gap:

| period | from | to |
|---|---|---|
| queue | the submission; the requeue or the new job | the next attempt's claim |
| startup | the first claim | the first step |
| training | a first step | the next failure, or the end; evaluating and saving are parts of it |
| recovery | a failure | the first step after it; the queue is no part of it |

GPU-hours count all GPUs of an attempt's nodes, spares included, from its claim to its end:

| part | counted GPUs and time |
|---|---|
| productive | GPUs of the ranks, in steps that count |
| recomputed | GPUs of the ranks, in steps that an interruption discarded: their number times the mean time of a step |
| recovering | all GPUs, in recoveries |
| waiting | all GPUs, in the startup; GPUs of spares, while the ranks train |
| evaluating and saving | GPUs of the ranks, in the rest of the training |
| unknown | GPUs of the ranks, if the script was interrupted and does not report how many steps that cost |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal

from hpc.run.events.attempts import Attempt
from hpc.run.events.downtime import Interruption
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep, Submitted, TrainStarted

Kind = Literal["queue", "startup", "training", "recovery"]
GPU_PARTS = ("productive", "recomputed", "recovering", "waiting", "evaluating and saving", "unknown")


@dataclass(frozen=True, kw_only=True)
class Period:
    """A part of a run's time. Times are seconds since the epoch."""

    kind: Kind
    began: float
    ended: float
    interruption: int | None = None
    """In a recovery, or in the queue within one, the number of the interruption, from 1; None in other periods."""

    @property
    def seconds(self) -> float:
        """The length of the period."""
        return self.ended - self.began


def periods_of(
    history: History, interruptions: Sequence[Interruption], until: float, *, own_script: bool
) -> list[Period]:
    """Return a run's periods until the time `until`. A user's script has no startup: it trains from the claim on."""
    submitted = [event.time for event in history.of(Submitted)]
    starts = [attempt.started for attempt in history.attempts]
    began, claimed = [*submitted, *starts, until][0], [*starts, until][0]
    first_step = next((event.time for event in history.of(FirstStep)), until)
    # Where spans overlap, the earliest in this list counts.
    spans = [
        Period(kind="queue", began=began, ended=claimed),
        *_down(history, interruptions, until, own_script=own_script),
        Period(kind="startup", began=claimed, ended=claimed if own_script else first_step),
        Period(kind="training", began=began, ended=until),
    ]
    edges = {min(max(edge, began), until) for span in spans for edge in (span.began, span.ended)}
    return [
        replace(next(span for span in spans if span.began <= start and end <= span.ended), began=start, ended=end)
        for start, end in pairwise(sorted(edges))
    ]


def _down(history: History, interruptions: Sequence[Interruption], until: float, *, own_script: bool) -> list[Period]:
    """Return the time in the queue of each interruption that ended its attempt, then each interruption's recovery.

    If the user resumed the run, both begin then. A period that has not ended ends at `until`. A user's script
    (`own_script`) need not report steps: without them, its recovery ends when the next attempt starts.
    """
    queues, recoveries, attempts = list[Period](), list[Period](), history.attempts
    resumed = {attempt.attempt: attempt.resumed for attempt in attempts}
    first_steps = [event.time for event in history.of(FirstStep)]
    failures = [interruption.failed_at or interruption.recorded_at for interruption in interruptions]
    for number, (interruption, failed) in enumerate(zip(interruptions, failures, strict=True), 1):
        seconds = interruption.seconds
        next_start, began, recorded = until, failed, interruption.recorded_at
        ends_attempt = seconds["start"] != 0
        if ends_attempt:
            began, recorded = (resumed[interruption.attempt] or time for time in (failed, recorded))
            later = [attempt.started for attempt in attempts if attempt.attempt > interruption.attempt]
            next_start = [*later, until][0]
            queued = recorded + (seconds["release"] or 0.0)
            queues.append(Period(kind="queue", began=queued, ended=next_start, interruption=number))
        if seconds["total"] is not None:
            ended = began + seconds["total"]
        elif own_script:
            ended = next_start if ends_attempt else failed
        else:  # the recovery is not over, or its beginning is not recorded
            ended = min([time for time in first_steps if time > recorded] + [*failures[number:], until])
        recoveries.append(Period(kind="recovery", began=began, ended=ended, interruption=number))
    return [*queues, *recoveries]


def gpu_hours(
    history: History,
    periods: Sequence[Period],
    gpus_per_node: int,
    last_logged: Mapping[str, Any],
    steps_lost: int | None,
) -> dict[str, float]:
    """Return GPU-hours by part; empty before the first attempt. All training of an uninterrupted script is productive.

    `last_logged` is the last line of the training's metrics, and empty before the first line.
    """
    hours, trained = dict.fromkeys(GPU_PARTS, 0.0), 0.0
    starts = history.of(TrainStarted)
    for attempt, period in product(history.attempts, periods):
        seconds = min(period.ended, attempt.ended or period.ended) - max(period.began, attempt.started)
        if seconds <= 0:
            continue
        allocated = seconds * len(attempt.nodes) * gpus_per_node
        if period.kind == "training":
            used = min(allocated, seconds * _ranks(starts, attempt, period.began, gpus_per_node))
            trained += used
            hours["waiting"] += allocated - used
        else:
            hours["recovering" if period.kind == "recovery" else "waiting"] += allocated
    # A fork does not count the steps of its original.
    done = max(1, last_logged["step"] - starts[0].step) if starts and "step" in last_logged else None
    if done is not None and (productive := _productive_seconds(starts, last_logged)) is not None:
        hours["productive"] = min(trained, productive)
        hours["recomputed"] = min(trained - hours["productive"], hours["productive"] / done * (steps_lost or 0))
        hours["evaluating and saving"] = trained - hours["productive"] - hours["recomputed"]
    elif done is not None and steps_lost is not None:
        hours["recomputed"] = trained * steps_lost / (done + steps_lost)
        hours["productive"] = trained - hours["recomputed"]
    else:
        hours["unknown" if steps_lost is None else "productive"] = trained
    return {part: seconds / 3600 for part, seconds in hours.items() if seconds > 0}


def _productive_seconds(starts: Sequence[TrainStarted], last_logged: Mapping[str, Any]) -> float | None:
    """Return the GPU-seconds of all steps that count, without those of a fork's original; None if not recorded."""
    if last_logged.get("train_seconds") is None:
        return None
    # A start's `train_seconds` are the seconds of the steps that count until then. Each of its ranks uses one GPU.
    marks = [*(start.train_seconds for start in starts), last_logged["train_seconds"]]
    trained = [max(0.0, end - begin) for begin, end in pairwise(marks)]
    return float(sum(start.world_size * seconds for start, seconds in zip(starts, trained, strict=True)))


def _ranks(starts: Sequence[TrainStarted], attempt: Attempt, time: float, gpus_per_node: int) -> int:
    """Return the number of ranks that train at a time; if no start is recorded, the number of GPUs of the members."""
    sizes = [start.world_size for start in starts if start.attempt == attempt.attempt and start.time <= time]
    return int(sizes[-1]) if sizes else len(attempt.members) * gpus_per_node
