"""States and plan with which the nodes of a job share the staging of one data set. Pure.

`jobs.staging.node_staging` exchanges them between the agents of the nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Address(NamedTuple):
    """The address of a node's server (`jobs.staging.peers`)."""

    node: str
    """The node's name."""
    host: str
    """The host name or address at which the other nodes reach the node."""
    port: int


class CacheStatus(StrEnum):
    """State of one node's copy of a data set."""

    MISSING = "missing"
    """The node makes a copy, or is about to."""
    COMPLETE = "complete"
    WAITING = "waiting"
    """Another job on this node is making the same copy."""
    UNAVAILABLE = "unavailable"
    """The node will have no copy."""


@dataclass(frozen=True, kw_only=True)
class NodeCache:
    """The report of one node about one data set."""

    source: str
    status: CacheStatus
    port: int = 0
    """The port of the node's server; 0 if it serves nothing."""


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """The first node's decisions about one data set."""

    source: str
    version: str
    """Name of the version of the data set (`SourceListing.version`)."""
    listing_port: int
    """The port on which the first node serves the listing."""
    owners: tuple[Address, ...] | None = None
    """Nodes that read or already have the data; None while undecided. Owner i, of n, has the batches i, i + n, i + 2n,
    ..."""
    done: bool = False
    """Whether no node copies any more."""


class StagingGroup:
    """The nodes of a job, seen from one of them. This base class is for a node without peers."""

    is_first = True
    """Whether this node lists the source."""
    has_peers = False
    """Whether the job has more than one node."""
    host = "localhost"
    """This node's name."""
    secret = ""
    """The secret with which the nodes of the job authenticate each other."""
    ports: Sequence[int] = ()
    """The ports on one of which to serve; if empty, the kernel chooses one."""

    def first_node(self, port: int) -> Address:
        """Return the address of a port of the first node."""
        return Address("localhost", "localhost", port)

    def publish_listing(self, version: str, port: int) -> None:
        """Announce, on the first node, the version and the port that serves its listing."""

    def plan(self) -> StagingPlan | None:
        """Return the first node's plan; None until this node has received it."""
        return StagingPlan(source="", version="", listing_port=0, owners=(), done=True)

    def report(self, status: CacheStatus, port: int) -> None:
        """Report the state of this node's copy, and the port that serves it."""


def choose_owners(caches: Iterable[tuple[Address, CacheStatus]]) -> tuple[Address, ...] | None:
    """Return the nodes that have the data or, if none has, those that will read the data; None while undecided.

    `caches` has the server's address (port 0 if there is no server) and the status of each node that has reported.
    """
    known = list(caches)
    for wanted in (CacheStatus.COMPLETE, CacheStatus.MISSING):
        found = tuple(address for address, status in known if status is wanted and address.port)
        if found:
            return found
    # A node that waits for another job's copy may still become an owner.
    return () if known and all(status is CacheStatus.UNAVAILABLE for _, status in known) else None
