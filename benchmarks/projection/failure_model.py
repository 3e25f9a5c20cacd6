"""A long training that fails at random and recovers, as a discrete-event simulation. Pure, and seeded by its caller.

The events are the failures of one job, with exponential times between them, and the end of the training. Between two
events the schedule of checkpoints and snapshots is fixed, so what was computed and what was saved follow by arithmetic.
Whatever is not saved is computed again. A job can fail while it recovers; the recovery then begins again.

Goodput is the productive time over the wall time, from the first step to the last one: what Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters" (arXiv 2410.21680), call the effective
training time ratio, here without the wait in the queue.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

import numpy as np


class Restart(Enum):
    """Where the job goes on after a failure."""

    IN_PLACE = "in place"
    SPARE = "on a spare node, if one is left, or else in a new job"
    NEW_JOB = "in a new job"


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """One kind of failure."""

    name: str
    share: float
    """Its share of all failures."""
    seconds: float
    """The time from the failure to the first new step."""
    restart: Restart
    keeps_snapshots: bool
    """Whether a node is left that has one in its memory."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a training saves its state and how it fails; all times in seconds."""

    mttf: float
    """Mean time to failure of the whole job."""
    kinds: Sequence[FailureKind]
    interval: float
    """Productive time between two checkpoints."""
    stall: float
    """How long a checkpoint stops the training."""
    background: float = 0.0
    """How long after that stall a checkpoint is complete."""
    snapshot_interval: float | None = None
    """Productive time between two snapshots; None: none are made."""
    snapshot_stall: float = 0.0
    snapshot_background: float = 0.0
    """How long after that stall a snapshot is complete."""
    spares: int = 0
    """Spare nodes of each new job."""
    new_job: float = 0.0
    """The time from the loss of a node to the first new step in a new job, when no spare is left."""

    def __post_init__(self) -> None:
        """Shares that do not make a whole are a mistake of the caller."""
        if not math.isclose(sum(kind.share for kind in self.kinds), 1.0):
            raise ValueError(f"the shares of the kinds of failure make {sum(kind.share for kind in self.kinds)}, not 1")

    @property
    def speed(self) -> float:
        """Return the productive time per time between two checkpoints."""
        if self.snapshot_interval is None:
            return 1.0
        return self.snapshot_interval / (self.snapshot_interval + self.snapshot_stall)

    @property
    def cycle(self) -> float:
        """Return the time from one checkpoint to the next."""
        return self.interval / self.speed + self.stall

    def work_after(self, seconds: float) -> float:
        """Return the productive time in the first `seconds` after a restart."""
        cycles, rest = divmod(max(0.0, seconds), self.cycle)
        return cycles * self.interval + min(rest * self.speed, self.interval)

    def saved_after(self, seconds: float) -> float:
        """Return what of it the last complete checkpoint has."""
        return max(0.0, (seconds - self.background) // self.cycle) * self.interval

    def in_memory_after(self, seconds: float) -> float:
        """Return what of it the last complete snapshot has."""
        if self.snapshot_interval is None:
            return 0.0
        return self.work_after(seconds - self.snapshot_background) // self.snapshot_interval * self.snapshot_interval

    def seconds_for(self, work: float) -> float:
        """Return how long so much productive time takes without a failure; the last step needs no checkpoint."""
        return work / self.speed + max(0, math.ceil(work / self.interval) - 1) * self.stall


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training, or the mean of many; the shares are of the wall time, and together with the goodput they make 1."""

    goodput: float
    half_width: float
    """Half the width of the confidence interval of 95 % of the goodput."""
    down_share: float
    lost_share: float
    """Computed twice."""
    saving_share: float
    failures: float
    trainings: int


def young_interval(stall: float, mttf: float) -> float:
    """Return the productive time between checkpoints that wastes least, to first order.

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) has the terms of higher
    order.
    """
    return math.sqrt(2 * stall * mttf)


def train_once(job: Job, work: float, random: np.random.Generator) -> Outcome:
    """Simulate one training of `work` seconds of productive time."""
    names = np.array([kind.share for kind in job.kinds]).cumsum()
    wall = down_time = lost = 0.0
    # Productive time, from the start of the training: at the last restart; in the last checkpoint.
    reached = durable = 0.0
    down, spares, failures = 0.0, job.spares, 0
    while True:
        until_failure = random.exponential(job.mttf)
        needed = job.seconds_for(work - reached)
        if down + needed <= until_failure:
            wall, down_time = wall + down + needed, down_time + down
            break
        wall, down_time = wall + until_failure, down_time + min(down, until_failure)
        trained = max(0.0, until_failure - down)
        kind = job.kinds[min(int(np.searchsorted(names, random.random(), side="right")), len(job.kinds) - 1)]
        failures += 1
        before, done = reached, job.work_after(trained)
        if (saved := job.saved_after(trained)) > 0:
            durable = before + saved
        # After a restart from a snapshot that state is in memory again.
        has_snapshot = job.snapshot_interval is not None and kind.keeps_snapshots
        reached = max(durable, before + job.in_memory_after(trained)) if has_snapshot else durable
        lost += before + done - reached
        in_new_job = kind.restart is Restart.NEW_JOB or (kind.restart is Restart.SPARE and not spares)
        if in_new_job:
            # What was in memory is saved for it.
            durable, spares = reached, job.spares
            down = kind.seconds if kind.restart is Restart.NEW_JOB else job.new_job
        else:
            spares -= kind.restart is Restart.SPARE
            down = kind.seconds
    return Outcome(
        goodput=work / wall, half_width=math.nan, down_share=down_time / wall, lost_share=lost / wall,
        saving_share=(wall - down_time - lost - work) / wall, failures=failures, trainings=1,
    )  # fmt: skip


def train(job: Job, work: float, seed: Sequence[int], *, half_width: float, most: int = 20_000) -> Outcome:
    """Return the mean of as many trainings as make the confidence interval narrow enough, 100 to `most`."""
    outcomes = list[Outcome]()
    for outcome in _trainings(job, work, seed):
        outcomes.append(outcome)
        # The spread is computed after every tenth more: after each it would cost more than the trainings.
        if len(outcomes) < 100 or len(outcomes) % max(10, len(outcomes) // 10):
            continue
        width = 1.96 * stdev(one.goodput for one in outcomes) / math.sqrt(len(outcomes))
        if width <= half_width or len(outcomes) >= most:
            break
    return Outcome(
        goodput=fmean(one.goodput for one in outcomes), half_width=width,
        down_share=fmean(one.down_share for one in outcomes), lost_share=fmean(one.lost_share for one in outcomes),
        saving_share=fmean(one.saving_share for one in outcomes), failures=fmean(one.failures for one in outcomes),
        trainings=len(outcomes),
    )  # fmt: skip


def _trainings(job: Job, work: float, seed: Sequence[int]) -> Iterator[Outcome]:
    random = np.random.default_rng(seed)
    while True:
        yield train_once(job, work, random)
