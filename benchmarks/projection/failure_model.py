"""A long training that fails at random and recovers, as a discrete-event simulation. Pure, and seeded by its caller.

The events are the failures of one job, with exponential times between them, and the end of the training. Between two
events the schedule of checkpoints and snapshots is fixed, so what was computed and what was saved follow by arithmetic.
Whatever is not saved is computed again. A job can fail while it recovers; the recovery then begins again.

Goodput is the productive time over the wall time, from the first step to the last one: what Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters" (arXiv 2410.21680), call the effective
training time ratio, here without the wait in the queue.
"""

import math
from collections.abc import Sequence
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


def young_interval(stall: float, mttf: float) -> float:
    """Return the productive time between checkpoints that wastes least, to first order.

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) has the terms of higher
    order.
    """
    return math.sqrt(2 * stall * mttf)


def train_once(job: Job, work: float, random: np.random.Generator) -> float:
    """Simulate one training of `work` seconds of productive time, and return its goodput."""
    shares = np.array([kind.share for kind in job.kinds]).cumsum()
    # Productive time, from the start of the training: at the last restart; in the last checkpoint.
    reached = durable = 0.0
    wall, down, spares = 0.0, 0.0, job.spares
    while True:
        until_failure = random.exponential(job.mttf)
        needed = job.seconds_for(work - reached)
        if down + needed <= until_failure:
            return work / (wall + down + needed)
        wall += until_failure
        trained = max(0.0, until_failure - down)
        kind = job.kinds[min(int(np.searchsorted(shares, random.random(), side="right")), len(job.kinds) - 1)]
        before = reached
        if (saved := job.saved_after(trained)) > 0:
            durable = before + saved
        # After a restart from a snapshot that state is in memory again.
        has_snapshot = job.snapshot_interval is not None and kind.keeps_snapshots
        reached = max(durable, before + job.in_memory_after(trained)) if has_snapshot else durable
        down = kind.seconds
        if kind.restart is Restart.SPARE and spares:
            spares -= 1
        elif kind.restart is not Restart.IN_PLACE:
            # What was in memory is saved for the new job.
            durable, spares = reached, job.spares
            down = kind.seconds if kind.restart is Restart.NEW_JOB else job.new_job


def train(job: Job, work: float, seed: Sequence[int], *, half_width: float, most: int = 20_000) -> tuple[float, float]:
    """Return the mean goodput of many trainings, and half the width of its confidence interval of 95 %.

    As many trainings as make the interval narrow enough, 100 to `most`.
    """
    random, goodputs = np.random.default_rng(seed), list[float]()
    while True:
        # The spread is computed after every tenth more: after each it would cost more than the trainings.
        goodputs += [train_once(job, work, random) for _ in range(max(100, len(goodputs) // 10))]
        width = 1.96 * stdev(goodputs) / math.sqrt(len(goodputs))
        if width <= half_width or len(goodputs) >= most:
            return fmean(goodputs), width
