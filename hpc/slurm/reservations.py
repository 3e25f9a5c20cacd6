"""Shortens a run's job whose time limit would run into a reservation, such as one for maintenance.

Slurm starts such a job only after the reservation, but a shorter job before it. The run continues in further jobs.
Runs on login and compute nodes.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from hpc.base.errors import TorchrelayError
from hpc.base.units import format_minutes
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm import sinfo
from hpc.slurm.squeue import slurm_time

# A shortened job that starts within these minutes ends in time. Later, --time-min lets Slurm shorten it further.
_SPARE_MINUTES = 1


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A reservation that has not ended."""

    name: str
    start: float
    """Time at which it begins, in seconds since the epoch."""
    nodes: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ShorterLimit:
    """A time limit with which the job of a run ends before a reservation begins."""

    minutes: int
    usual: int
    """The time limit of the run."""
    least_minutes: int
    """The shortest useful time limit, which Slurm may use instead (--time-min)."""
    reservation: Reservation

    @property
    def options(self) -> list[str]:
        """The options of sbatch that set this limit."""
        return [f"--time={self.minutes}", f"--time-min={self.least_minutes}"]

    def __str__(self) -> str:
        begins = datetime.fromtimestamp(self.reservation.start).astimezone().isoformat(timespec="seconds")
        return (
            f"reservation {self.reservation.name} begins at {begins}: the time limit of this job is "
            f"{format_minutes(self.minutes)} instead of {format_minutes(self.usual)}"
        )


def shorter_limit(spec: RunSpec) -> ShorterLimit | None:
    """Return a shorter time limit for the next job of a run, if the usual limit would run into a reservation.

    Returns None if no reservation is in the way, if too little time is left for a job, or if Slurm does not answer.
    """
    resources, now = spec.resources, time.time()
    own, end = [option.partition("=") for option in resources.sbatch], now + 60 * resources.limit_minutes
    try:
        named = {value for key, _, value in own if key == "reservation"}
        others = [_read(fields) for fields in slurm.show_reservations() if fields["ReservationName"] not in named]
        ahead = [one for one in others if one.start <= end]
        if not ahead:
            return None
        free = sinfo.usable_nodes(resources.partition)
        free -= {*slurm.hostnames(resources.exclude)} if resources.exclude else set()
    except TorchrelayError:
        return None  # sbatch will say what is wrong
    found = first_obstacle(ahead, free, spec.job_nodes[0])
    minutes = math.floor((found.start - now) / 60) - _SPARE_MINUTES if found else 0
    if found is None or minutes < spec.shortest_minutes:
        return None
    return ShorterLimit(
        minutes=minutes, usual=resources.limit_minutes, least_minutes=spec.shortest_minutes, reservation=found
    )


def _read(fields: slurm.Fields) -> Reservation:
    nodes = fields.get("Nodes", "(null)")
    names = [] if nodes == "(null)" else slurm.hostnames(nodes)
    start = slurm_time(fields["StartTime"])
    return Reservation(name=fields["ReservationName"], start=inf if start is None else start, nodes=frozenset(names))


def first_obstacle(reservations: Sequence[Reservation], free: set[str], needed: int) -> Reservation | None:
    """Return the first reservation that makes the `free` nodes too few for a job; None if none does. Pure."""
    left = set(free)
    for one in sorted(reservations, key=lambda each: each.start):
        left -= one.nodes
        if len(left) < needed <= len(free):
            return one
    return None
