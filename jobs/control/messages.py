"""What the agents of an attempt send each other: statuses to the head node's agent, its directive back. Pure data.

Both are whole states: a new connection begins with them, and what a broken one has lost does no harm.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from hpc.base.transport import DecodeError
from hpc.run.causes import Cause
from jobs.staging.coordination import NodeCache, StagingPlan


class Phase(StrEnum):
    """What an agent is doing."""

    STARTING = "starting"
    """Staging, or not heard from yet."""
    READY = "ready"
    """Waiting for a round that includes this node."""
    RUNNING = "running"
    """In a round."""
    ENDED = "ended"
    """Its torchrun of the round has ended, and it waits for the next directive."""
    FAILED = "failed"
    """It cannot take part in this attempt."""
    BAD_NODE = "bad_node"
    """The same, and the fault is the node's: the next attempt avoids it."""
    LEFT = "left"
    """All its processes of this attempt have ended."""


OVER = frozenset({Phase.FAILED, Phase.BAD_NODE, Phase.LEFT})
"""Phases after which an agent does nothing more."""


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
    """A rank that exited with an error. Times are seconds since the epoch."""

    node: str
    round: int
    rank: int
    started_at: float
    failed_at: float
    exit_code: int
    signal: str | None
    cause: Cause
    step: int | None
    """The last step that it had done; None if unknown."""
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
    """A free port, in case this node hosts the next rendezvous."""
    detail: str = ""
    """Why it failed."""
    heartbeats: tuple[RankHeartbeat, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    """The last few, of all rounds."""
    signal: str | None = None
    """The first signal that asked this node to stop."""
    caches: tuple[NodeCache, ...] = ()
    """What it has of each data set."""


@dataclass(frozen=True, kw_only=True)
class Directive:
    """What the head node's agent wants of all agents."""

    round: int = 0
    """0: wait."""
    members: tuple[int, ...] = ()
    """Node ranks that take part in the round; the first one hosts its rendezvous."""
    host: str = ""
    """At which the others reach the first one."""
    port: int = 0
    paused: bool = False
    """The members end their ranks and wait for another round: for a lost node, or after repeated failures."""
    preflight: bool = False
    """The round only checks its members, before a user's script that would not."""
    abort_count: int = 0
    """Counts the head's requests to kill all ranks; an agent kills its own each time the number rises."""
    stop: bool = False
    """The run was cancelled: all agents stop, as on SIGTERM."""
    over: bool = False
    """The attempt ends: end all ranks."""
    plans: tuple[StagingPlan, ...] = ()
    """By data set: which node reads what."""

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """The fields, made once for all nodes: a copy of a thousand members takes a millisecond."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The head node's answer to a status."""

    time: float
    """The clock of the head node, in seconds since the epoch."""
    directive: Directive | None = None
    """None: it has not changed since the last answer of this connection."""


_Message = TypeVar("_Message", NodeStatus, Answer)


def decode(message: dict[str, Any], kind: type[_Message]) -> _Message:
    """Convert a message to a status or an answer. Raises DecodeError if a field is missing or has another type."""
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise DecodeError(f"a message is not of the kind {kind.__name__}: {error}") from error
