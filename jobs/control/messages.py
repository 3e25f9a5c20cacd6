"""Messages between the agents of an attempt: statuses to the first node's agent, and its directive back. Pure data.

Each message is a whole state, so a message that a broken connection has lost does no harm.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from hpc.base.transport import DecodeError
from hpc.run.causes import Cause
from hpc.run.events.kinds import RankFailed
from jobs.staging.coordination import NodeCache, StagingPlan


class Phase(StrEnum):
    """State of a node's agent in an attempt."""

    STARTING = "starting"
    """The agent is staging, or has not reported yet."""
    READY = "ready"
    """The agent waits for a round that includes its node."""
    RUNNING = "running"
    """The node takes part in a round."""
    ENDED = "ended"
    """The round's torchrun has ended on this node, and the agent waits for the next directive."""
    FAILED = "failed"
    """The node cannot take part in this attempt."""
    BAD_NODE = "bad_node"
    """The node cannot take part because of a fault of its own, so the next attempt avoids it."""
    LEFT = "left"
    """The node has ended its ranks, and takes no further part in this attempt."""


ABLE = frozenset({Phase.READY, Phase.RUNNING, Phase.ENDED})
"""Phases of nodes that can take part in a round."""
OVER = frozenset({Phase.FAILED, Phase.BAD_NODE, Phase.LEFT})
"""Phases in which an agent takes no further part in the attempt."""


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat:
    """State of one rank, as its node's agent sees it."""

    rank: int
    step: int
    phase: str
    state: str
    """The kernel's letter for the state of the process: T is stopped, D cannot be killed."""
    still_seconds: float
    """Seconds since the rank's last sign of life, by its node's clock."""
    step_seconds: float | None
    """Mean seconds per recent step; None if unknown."""
    busy_seconds: float | None
    """Mean seconds of the rank's own work in recent steps; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """A rank that runs, or that has ended with exit code 0."""

    rank: int
    restarts: int
    """Number of times that the ranks of all nodes had restarted together in the round when this rank started."""
    has_ended: bool
    counted_steps: int | None = None
    """Optimizer steps of a rank that has ended, if it did not report them; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """State of one node, as its agent reports it to the first node's agent."""

    node_rank: int
    phase: Phase = Phase.STARTING
    round: int = 0
    """Number of the node's current or last round; 0 before its first."""
    exit_code: int = 0
    """Exit code of the round's torchrun; 0 while it runs, and if this node left the round before its end."""
    port: int = 0
    """A free port, in case this node hosts the next rendezvous."""
    detail: str = ""
    """Why the node failed; empty if it has not."""
    cause: Cause = Cause.CRASHED
    """The cause if the node failed."""
    heartbeats: tuple[RankHeartbeat, ...] = ()
    starts: tuple[RankStart, ...] = ()
    """The last start of each of the node's ranks in the round, unless that rank has failed."""
    failures: tuple[RankFailed, ...] = ()
    """The last few failures of the node's ranks, in any round."""
    signal: str | None = None
    """The first signal that asked this node to stop."""
    caches: tuple[NodeCache, ...] = ()
    """State of the node's copy of each data set."""


@dataclass(frozen=True, kw_only=True)
class Directive:
    """Instructions of the first node's agent to all agents."""

    round: int = 0
    """Number of the current round; 0 before the first one."""
    members: tuple[int, ...] = ()
    """Node ranks that take part in the round. The first member hosts the rendezvous."""
    saver: int = 0
    """Node rank of the member that saves its snapshot when the attempt ends: the first one that is not lost."""
    host: str = ""
    """Address at which the other members reach the first one."""
    port: int = 0
    paused: bool = False
    """Whether the members end their ranks and wait for another round: too few nodes are left, or failures repeat."""
    preflight: bool = False
    """Whether the round only checks its members, because the user's script would not check them."""
    abort_count: int = 0
    """Number of times the first node has asked to kill all ranks. When it rises, an agent kills its node's ranks."""
    stop: bool = False
    """Whether the run was cancelled, so that all agents stop as on SIGTERM."""
    over: bool = False
    """Whether the attempt is over, so that all agents end their ranks."""
    plans: tuple[StagingPlan, ...] = ()
    """A plan for each data set: which node reads what."""

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """The fields as a dict, made once for all nodes: copying a thousand members takes a millisecond."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The first node's answer to a status."""

    time: float
    """Time of the first node's clock, in seconds since the epoch."""
    directive: Directive | None = None
    """The directive; None if it has not changed since the last answer on this connection."""


_Message = TypeVar("_Message", NodeStatus, Answer)


def decode(message: dict[str, Any], kind: type[_Message]) -> _Message:
    """Convert a message to a status or an answer. Raises DecodeError if a field is missing or has another type."""
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise DecodeError(f"a message is not of the kind {kind.__name__}: {error}") from error
