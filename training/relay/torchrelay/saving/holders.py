"""Says which ranks write which shards, and which node keeps copies of another node's shards. Pure.

A rank's shard is what it holds of the state. With DDP, all ranks have the same shard: the whole state. With FSDP, each
rank has its own, or each node has all of them (hybrid).
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Holders:
    """The shards of all ranks."""

    shards: tuple[int, ...]
    """For each rank, the number of its shard."""
    nodes: tuple[int, ...]
    """For each node, its first rank."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return max(self.shards) + 1

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return bisect_right(self.nodes, rank) - 1

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self.nodes[node], [*self.nodes, len(self.shards)][node + 1])

    @cached_property
    def snapshot_writers(self) -> dict[int, int]:
        """The ranks that write snapshots, with their shards: on each node, the first rank of each shard."""
        writers = dict[int, int]()
        for node in range(len(self.nodes)):
            of_node = {self.shards[rank]: rank for rank in reversed(self.ranks_of(node))}
            writers |= {rank: shard for shard, rank in of_node.items()}
        return writers

    def writes_checkpoint(self, rank: int) -> bool:
        """Return whether a rank writes its shard to checkpoints: it is the first rank of the shard."""
        return self.shards.index(self.shards[rank]) == rank

    @cached_property
    def keepers(self) -> dict[int, int]:
        """The ranks that send their shard to a rank of the next node, which keeps a copy, with that rank.

        A shard that several nodes hold needs no copy.
        """
        if len(self.nodes) == 1:
            return {}
        nodes_of = dict[int, set[int]]()
        for rank, shard in enumerate(self.shards):
            nodes_of.setdefault(shard, set()).add(self.node_of(rank))
        keepers = dict[int, int]()
        for rank, shard in self.snapshot_writers.items():
            if len(nodes_of[shard]) == 1:
                node = self.node_of(rank)
                of_next = self.ranks_of((node + 1) % len(self.nodes))
                keepers[rank] = of_next[(rank - self.nodes[node]) % len(of_next)]
        return keepers

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks of whose shards a rank keeps copies."""
        return [other for other, keeper in self.keepers.items() if keeper == rank]
