"""What the nodes of a job tell each other while they stage: where the list of files is, and who reads what.

Pure data, and the node that is alone. The nodes of a job are `jobs.staging.coordination`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

Address = tuple[str, int]
"""Host and port of a node's server (`hpc.staging.peers`)."""


class CacheStatus(StrEnum):
    """What a node has of the data."""

    ALL = "all"
    """Nothing: it is about to copy."""
    NOTHING = "nothing"
    """A whole copy."""
    SOME = "some"
    """A copy of which it is about to mend some files: it reads no part for the others."""
    WAITS = "waits"
    """Another job on this node copies the same at the moment."""
    ABSENT = "absent"
    """It will have no copy."""


@dataclass(frozen=True, kw_only=True)
class NodeCache:
    """What one node tells of one data set."""

    source: str
    need: CacheStatus
    port: int = 0
    """Of its server; 0: it gives nothing."""


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """What the leading node says about one data set."""

    source: str
    entry: str
    """The version of the data set."""
    lister: Address
    """Who has the list of files."""
    owners: tuple[Address, ...] | None = None
    """Who has the data, or reads them: of n owners, batch b is the part of owner b modulo n. None: not yet decided."""
    done: bool = False
    """Whether no node copies any more."""


def read_plan(fields: dict[str, Any]) -> StagingPlan:
    """From JSON."""
    owners = fields["owners"]
    places = None if owners is None else tuple((host, port) for host, port in owners)
    return StagingPlan(**{**fields, "lister": tuple(fields["lister"]), "owners": places})


class StagingGroup(Protocol):
    """The other nodes of the job."""

    @property
    def leads(self) -> bool:
        """Whether this is the node that lists the files."""

    @property
    def host(self) -> str:
        """This node's name."""

    @property
    def nonce(self) -> str:
        """What proves to the others that one belongs to the job."""

    def offer(self, entry: str, port: int) -> None:
        """The leading node: this is the version, and here is the list."""

    def plan(self) -> StagingPlan | None:
        """What the leading node says, as far as it is known here."""

    def stand(self, need: CacheStatus, port: int) -> None:
        """Say what this node needs."""


class SingleNode:
    """A node without others."""

    leads = True
    host = "localhost"
    nonce = ""

    def offer(self, entry: str, port: int) -> None:
        """Nobody listens."""

    def plan(self) -> StagingPlan | None:
        """There is none to make: this node reads everything."""
        return StagingPlan(source="", entry="", lister=("", 0), owners=(), done=True)

    def stand(self, need: CacheStatus, port: int) -> None:
        """Nobody listens."""


def choose_owners(told: Iterable[tuple[str, NodeCache]]) -> tuple[Address, ...] | None:
    """Who has the data already, or, if nobody does, those who are about to read them; None: nobody can say yet.

    Args:
        told: hosts with what they have told.
    """
    standings = list(told)
    for need in (CacheStatus.NOTHING, CacheStatus.ALL):
        found = tuple((host, standing.port) for host, standing in standings if standing.need is need and standing.port)
        if found:
            return found
    # Where all wait for other jobs' copies, there may be none to read.
    ready = bool(standings) and all(
        standing.need in {CacheStatus.SOME, CacheStatus.ABSENT} for _, standing in standings
    )
    return () if ready else None
