"""What the agents of an attempt tell each other: reports to the head node's agent, orders from it. Pure data.

Both are whole states, sent again and again: one that is lost on the way does no harm.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hpc.staging.coordination import CacheStatus, NodeCache, StagingPlan, read_plan


class Phase(StrEnum):
    """What an agent is doing."""

    STARTING = "starting"
    """Staging, or not there yet."""
    READY = "ready"
    """Waiting for a round that needs this node."""
    RUNNING = "running"
    """In a round."""
    ENDED = "ended"
    """Its torchrun of the round is over, and it waits for what comes next."""
    FAILED = "failed"
    """It cannot take part in this attempt."""
    LEFT = "left"
    """Nothing of it runs any more."""


OVER = frozenset({Phase.FAILED, Phase.LEFT})
"""Phases of an agent from which nothing more is expected."""


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat:
    """One rank, as its node's agent sees it."""

    rank: int
    step: int
    phase: str
    state: str
    """The kernel's letter for the process: T is stopped, D cannot be killed."""
    still_seconds: float
    """Since its last sign of life, by the clock of its node."""
    step_seconds: float | None
    busy_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A rank that ended badly. Times are seconds since the epoch."""

    node: str
    round: int
    rank: int
    started_at: float
    failed_at: float
    exit_code: int
    signal: str | None
    cause: str
    step: int | None
    """The last step that it had done; None if nobody knows."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What the head node's agent knows of one node."""

    node_rank: int
    phase: Phase = Phase.STARTING
    round: int = 0
    """The round that it is in, or was in last."""
    exit_code: int = 0
    """Of that round's torchrun, once it has ended."""
    port: int = 0
    """A free port, should this node be the one to host the next round."""
    detail: str = ""
    """Why it failed."""
    beats: tuple[RankHeartbeat, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    """The last few, of all rounds."""
    signal: str | None = None
    """The first signal that asked this node to stop."""
    standings: tuple[NodeCache, ...] = ()
    """What it has of the data, by data set."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "NodeStatus":
        """From JSON."""
        beats = tuple(RankHeartbeat(**beat) for beat in fields.pop("beats"))
        failures = tuple(RankFailure(**failure) for failure in fields.pop("failures"))
        phase = Phase(fields.pop("phase"))
        standings = tuple(
            NodeCache(**{**standing, "status": CacheStatus(standing["status"])}) for standing in fields.pop("standings")
        )
        return cls(**fields, phase=phase, beats=beats, failures=failures, standings=standings)


@dataclass(frozen=True, kw_only=True)
class Directive:
    """What all agents are to do."""

    round: int = 0
    """0: wait."""
    members: tuple[int, ...] = field(default=())
    """Node ranks that take part in the round; the first one hosts its rendezvous."""
    port: int = 0
    preflight: bool = False
    """The round only checks its members, before a script of the user's that would not."""
    aborts: int = 0
    """How often all ranks were to be killed, so that torchrun starts them again."""
    over: bool = False
    """The attempt ends: end what runs."""
    plans: tuple[StagingPlan, ...] = ()
    """Who reads what of the data, by data set."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Directive":
        """From JSON."""
        plans = tuple(map(read_plan, fields["plans"]))
        return cls(**{**fields, "members": tuple(fields["members"]), "plans": plans})
