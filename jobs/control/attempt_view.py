"""The state of all nodes of an attempt at one moment, and what follows from it. Pure; for the first node's agent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpc.run.events.kinds import RankFailed
from jobs.control.messages import ABLE, Directive, NodeStatus, Phase, RankHeartbeat, RankStart
from jobs.control.rank_starts import ended_ranks

# A node that has not reported within this time never will: its file systems are not mounted, or its network is closed.
_FIRST_REPORT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """The last directive, the nodes as they have reported themselves, and the limits of the run."""

    directive: Directive
    statuses: Mapping[int, NodeStatus]
    """Status by node rank, of the nodes that have reported."""
    hostnames: Sequence[str]
    lost: frozenset[int]
    """Node ranks of silent nodes."""
    awaited: frozenset[int] = frozenset()
    """Node ranks of lost nodes whose link may come back."""
    bad_nodes: frozenset[int]
    """Node ranks of nodes that have failed the preflight, or hang."""
    ranks_per_node: int
    min_nodes: int
    max_nodes: int
    """The most nodes on which the run trains. Further nodes are spares."""
    waited_seconds: float
    """Seconds since the attempt began."""
    failed_rounds: int
    """Number of successive rounds in which torchrun itself failed."""

    @cached_property
    def current(self) -> list[NodeStatus]:
        """The statuses of the members that are not lost and have begun the current round."""
        members = [rank for rank in self.directive.members if rank in self.statuses and rank not in self.lost]
        return [status for rank in members if (status := self.statuses[rank]).round == self.directive.round]

    @cached_property
    def heartbeats(self) -> dict[int, RankHeartbeat]:
        """The last heartbeat of each rank that runs in the current round."""
        return {heartbeat.rank: heartbeat for status in self.current for heartbeat in status.heartbeats}

    @property
    def starts(self) -> list[RankStart]:
        """The last starts of the ranks of the current round."""
        return [start for status in self.current for start in status.starts]

    @property
    def failures(self) -> set[RankFailed]:
        """The failures of ranks that the nodes have reported, in any round."""
        return {failure for status in self.statuses.values() for failure in status.failures}

    @property
    def world_size(self) -> int:
        """The number of ranks of the current round."""
        return len(self.directive.members) * self.ranks_per_node

    @property
    def saver(self) -> int:
        """The first member that is not lost; if all are lost, the member that the directive names."""
        return next((rank for rank in self.directive.members if rank not in self.lost), self.directive.saver)

    @property
    def has_left(self) -> bool:
        """Whether a member has ended its ranks, because its link to this node was lost for a moment."""
        return any(status.phase is Phase.READY for status in self.current)

    @property
    def has_failed_torchrun(self) -> bool:
        """Whether torchrun has failed on a member in the current round."""
        return any(status.exit_code for status in self.current)

    def has_spare_that_fails(self, silent: Iterable[int]) -> bool:
        """Return whether a node fails in the preflight. `silent` are the node ranks that have not reported lately."""
        phases = {self.statuses[rank].phase for rank in self.directive.members}
        has_failed = self.has_left or self.has_failed_torchrun or any(status.failures for status in self.current)
        return has_failed or not phases <= ABLE or not set(self.directive.members).isdisjoint(silent)

    def ended_ranks(self, number: int, restarts: int) -> tuple[int, ...]:
        """Return the ranks of a round that had started after a number of restarts and have ended with exit code 0."""
        statuses = [status for status in self.statuses.values() if status.round == number]
        return ended_ranks([start for status in statuses for start in status.starts], restarts)

    def node_of(self, rank: int) -> int | None:
        """Return the node rank of the node that runs a rank; None if unknown. Lost nodes' old statuses are skipped."""
        present = [(node, status) for node, status in self.statuses.items() if node not in self.lost]
        return next((node for node, status in present if rank in {beat.rank for beat in status.heartbeats}), None)

    @property
    def able(self) -> list[int]:
        """Node ranks that could take part in a round now, the lowest first."""
        able = {node_rank for node_rank, status in self.statuses.items() if status.phase in ABLE}
        return sorted(able - self.lost - self.bad_nodes)

    @property
    def num_pending(self) -> int:
        """Number of nodes that may yet become able."""
        starting = {node_rank for node_rank, status in self.statuses.items() if status.phase is Phase.STARTING}
        may_report = self.waited_seconds < _FIRST_REPORT_SECONDS
        unheard = set(range(len(self.hostnames))) - self.statuses.keys() if may_report else set[int]()
        return len((starting | unheard) - self.lost - self.bad_nodes | self.awaited)
