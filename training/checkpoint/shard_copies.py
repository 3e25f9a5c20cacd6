"""Keeps each node's shards in the memory of the next node, too, so that a lost node loses none (`--strategy fsdp`).

A node's memory has a directory of snapshots for each shard that it holds, such as `shard-00003-of-00008`. After a lost
node, the ranks bring each node the shards that it needs, from any node that holds them. Nodes that hold a whole model
each (`--fsdp-sharding hybrid`) need no copies. Runs on every rank.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import Work
from torchrelay.checkpoint_files import checkpoint_path, remove_published, remove_unpublished
from torchrelay.restoring import remove_newer

from hpc.run.rundir import STATE_VALUES
from training.checkpoint.sharded import SHARD_SUFFIX, read_own_shards, read_shards, shard_file
from training.checkpoint.snapshot import Shard, lacking_space, list_shards, shard_directory
from training.checkpoint.snapshot_files import SnapshotFiles
from training.checkpoint.state import TrainState
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

_GATHERED = "gathered"


@dataclass(frozen=True, kw_only=True)
class ShardedState:
    """A snapshot whose shards are in the memory of the nodes."""

    count: int
    """Number of shards."""
    held: list[dict[int, int]]
    """For each node, the numbers of the shards that it holds, with their bytes."""


@dataclass(kw_only=True)
class ShardCopies:
    """The shards in the memory of all nodes."""

    directory: Path
    """The snapshots in this node's memory."""
    group: ProcessGroup
    nodes: list[int]
    """The first rank of each node."""
    index: int
    count: int
    """This rank holds the shard `index` of `count` shards."""
    states: dict[int, ShardedState] = field(default_factory=dict)
    """The complete snapshots by step, as `find` has found them."""
    received: dict[int, SnapshotFiles] = field(default_factory=dict)
    """By shard, the files for the copies that this rank keeps."""

    @classmethod
    def of(cls, context: RunContext, group: ProcessGroup) -> "ShardCopies | None":
        """Return the shards of a training, or None if it has none. All ranks must call this."""
        if not context.node_dir or context.config.strategy != "fsdp":
            return None
        rank = group.rank_info
        nodes = sorted(set(group.all_gather_json(rank.rank - rank.local_rank)))
        index, count = rank.rank, rank.world_size
        if context.config.fsdp_sharding == "hybrid":
            index, count = rank.local_rank, rank.local_world_size
        return cls(directory=context.node_dir.snapshots, group=group, nodes=nodes, index=index, count=count)

    def path(self, index: int, count: int) -> Path:
        """Return this node's directory for the snapshots of a shard."""
        return self.directory / shard_directory(index, count)

    def snapshot(self, step: int) -> Path:
        """Return the path of a snapshot of this rank's shard, or of any shard if their number has changed."""
        count = self.states[step].count if step in self.states else self.count
        return checkpoint_path(self.path(self.index % count, count), step)

    @property
    def are_kept(self) -> bool:
        """Whether the next node keeps copies of a node's shards."""
        return len(self.nodes) > 1 and self.count == self.group.world_size

    @property
    def own_directory(self) -> Path:
        """This rank's directory for the snapshots of its shard."""
        return self.path(self.index, self.count)

    @property
    def kept_directories(self) -> list[Path]:
        """The directories in which this rank keeps copies."""
        return [self.path(rank, self.count) for rank in self._kept_for(self.group.rank)]

    @property
    def are_allocated(self) -> bool:
        """Whether the next copies that this rank keeps need no more memory."""
        sources = self._kept_for(self.group.rank)
        return all(source in self.received and self.received[source].are_allocated for source in sources)

    @property
    def held_by_node(self) -> int:
        """Number of shards, copies included, whose snapshots this node's ranks write."""
        return len(self.names)

    @property
    def names(self) -> set[str]:
        """The names of the directories that this node's ranks write in this attempt."""
        node = self._node_of(self.group.rank)
        shards = self._needed(node) | {shard for rank in self._ranks(node) for shard in self._kept_for(rank)}
        return {shard_directory(shard, self.count) for shard in shards}

    def _node_of(self, rank: int) -> int:
        return bisect_right(self.nodes, rank) - 1

    def _ranks(self, node: int) -> range:
        return range(self.nodes[node], [*self.nodes, self.group.world_size][node + 1])

    def _needed(self, node: int) -> set[int]:
        """Return the numbers of the shards that a node's ranks train."""
        return set(self._ranks(node) if self.count == self.group.world_size else range(self.count))

    def _keeper(self, rank: int) -> int:
        """Return the rank on the next node that keeps the copies of a rank's shards."""
        node = self._node_of(rank)
        keepers = self._ranks((node + 1) % len(self.nodes))
        return keepers[(rank - self.nodes[node]) % len(keepers)]

    def _kept_for(self, rank: int) -> list[int]:
        """Return the ranks, and so the shards, of which a rank keeps copies: ranks of the previous node."""
        previous = self._ranks((self._node_of(rank) - 1) % len(self.nodes))
        return [other for other in previous if self.are_kept and self._keeper(other) == rank]

    # --- copies ---

    def copy_to_next_node(self, step: int, problem: str, group: ProcessGroup) -> None:
        """Send this rank's snapshot to the next node, and keep those of the previous node. All ranks must call this.

        `problem` says why this rank has no snapshot of this step, or is empty. `group` connects the calling threads.

        Raises:
            OSError: on all ranks, if a rank has no snapshot or cannot keep a copy.
        """
        own = self.snapshot(step)
        sending = _send(own, self._keeper(group.rank), group)  # before this rank waits for another one
        for source in self._kept_for(group.rank):
            files = self.received.setdefault(source, SnapshotFiles(self.path(source, self.count)))
            try:
                _receive(source, files, step, group)
            except OSError as error:
                problem = problem or str(error)
        for message in sending:
            message.wait()
        _raise_first(problem, group)

    # --- restore ---

    def find(self) -> list[int]:
        """Return the steps for which the nodes together hold all shards of a snapshot. All ranks must call this."""
        own = list[Shard]()
        if self.group.rank_info.local_rank == 0:
            for directory in self.directory.glob("shard-*"):
                remove_unpublished(directory, "step-*")
            own = list_shards(self.directory)
        gathered = self.group.all_gather_json(
            [((each.step, each.attempt, each.count), each.index, each.size_bytes) for each in own]
        )
        nodes = [gathered[first] for first in self.nodes]
        # Combine only shards of one attempt: two attempts may have had different flags, so that their states at the
        # same step differ. The newest attempt replaces the older ones.
        for origin in sorted({tuple(origin) for shards in nodes for origin, _, _ in shards}):
            step, _, count = origin
            held = [{index: size for found, index, size in shards if tuple(found) == origin} for shards in nodes]
            if set[int]().union(*held) == set(range(count)):
                self.states[step] = ShardedState(count=count, held=held)
        return sorted(self.states)

    def gather(self, step: int) -> Iterator[int]:
        """Bring each node the shards of a snapshot that it needs, and yield each. All ranks must iterate to the end.

        Raises:
            OSError: on all ranks, if a node could not read or keep a shard, or lacks the memory.
        """
        state, problem = self.states[step], ""
        moves = list(self._moves(state))
        sizes = [state.held[self.nodes.index(source)][index] for index, source, to in moves if to == self.group.rank]
        if sizes:
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                problem = lacking_space(self.directory, sum(sizes), buffer_bytes=0)
            except OSError as error:
                problem = str(error)
        _raise_first(problem, self.group)
        for index, source, target in moves:
            yield index
            directory = self.path(index, state.count)
            if self.group.rank == source:
                for message in _send(checkpoint_path(directory, step), target, self.group):
                    message.wait()
            elif self.group.rank == target:
                # Newer snapshots are incomplete or were not usable. Two of them would make this one outdated at once.
                remove_newer(directory, step)
                try:
                    _receive(source, SnapshotFiles(directory), step, self.group)
                except OSError as error:
                    problem = problem or str(error)
        if state.count != self.count and self.group.rank_info.local_rank == 0:
            try:
                self._link(step, state.count)
            except OSError as error:
                problem = problem or str(error)
        _raise_first(problem, self.group)

    def _link(self, step: int, count: int) -> None:
        """Make a directory with links to the files of all shards of a snapshot, in which torch can read them."""
        gathered = self.directory / _GATHERED
        remove_published(gathered)
        gathered.mkdir(mode=0o700)
        for index in range(count):
            file = shard_file(checkpoint_path(self.path(index, count), step))
            (gathered / f"{index}{file.suffix}").symlink_to(file)

    def _moves(self, state: ShardedState) -> Iterator[tuple[int, int, int]]:
        """Yield the shards that nodes need and lack. Each comes with the first ranks of its holder and of the node."""
        for index in range(state.count):
            holders = [first for first, held in zip(self.nodes, state.held, strict=True) if index in held]
            for node, first in enumerate(self.nodes):
                # If the number of shards has changed, each rank reads parts of several shards.
                is_needed = state.count != self.count or index in self._needed(node)
                if is_needed and first not in holders:
                    yield index, holders[node % len(holders)], first

    def read(self, step: int, state: TrainState) -> dict[str, Tensor]:
        """Read this rank's part of a gathered snapshot.

        Raises:
            OSError, SafetensorError: a file cannot be read.
        """
        if self.states[step].count == self.count:
            return read_own_shards(self.snapshot(step), state)
        return read_shards(self.directory / _GATHERED, state)

    def discard(self, step: int) -> None:
        """Remove this node's shards of a snapshot. Only one rank of a node may call this."""
        for directory in self.directory.glob("shard-*"):
            remove_published(checkpoint_path(directory, step))

    def remove_newer(self, step: int) -> None:
        """Remove this node's snapshots of shards that are newer than `step`. Only one rank of a node may call this."""
        for directory in self.directory.glob("shard-*"):
            remove_newer(directory, step)


def _send(path: Path, target: int, group: ProcessGroup) -> list[Work]:
    """Start to send a snapshot's files to another rank, and return the messages; if they cannot be read, their sizes 0.

    `_receive` receives them.
    """
    try:
        files = [_map(shard_file(path)), _map(path / STATE_VALUES)]
    except (OSError, ValueError):
        files = []
    sizes = torch.tensor([file.numel() for file in files] or [0, 0])
    messages = (
        distributed.isend(message, target, group=group.control, tag=tag) for tag, message in enumerate([sizes, *files])
    )
    return [message for message in messages if message]


def _map(file: Path) -> Tensor:
    """Return the bytes of a file, which are not read before they are used. Raises ValueError if it is empty."""
    return torch.from_numpy(np.memmap(file, mode="c"))


def _receive(source: int, files: SnapshotFiles, step: int, group: ProcessGroup) -> None:
    """Receive a snapshot from another rank, and save it.

    Raises:
        OSError: the other rank has no such snapshot, or this one cannot be saved. All messages have been received.
    """
    sizes, problem = torch.zeros(2, dtype=torch.int64), ""
    distributed.recv(sizes, source, group=group.control, tag=0)
    size_bytes, values_bytes = sizes.tolist()
    if not size_bytes:
        raise OSError(f"rank {source} has no shard of step {step}")
    values = torch.empty(values_bytes, dtype=torch.uint8)
    try:
        shard = files.for_bytes(f"{files.directory.name}{SHARD_SUFFIX}", size_bytes)
    except OSError as error:
        shard, problem = torch.empty(size_bytes, dtype=torch.uint8), str(error)
    for tag, message in enumerate((shard, values), start=1):
        distributed.recv(message, source, group=group.control, tag=tag)
    if problem:
        raise OSError(problem)

    def write_values(directory: Path) -> None:
        (directory / STATE_VALUES).write_bytes(values.numpy().data)

    files.save(step, write_values)


def _raise_first(problem: str, group: ProcessGroup) -> None:
    """Raise OSError on all ranks if any rank has a problem. All ranks must call this."""
    for rank, text in enumerate(group.all_gather_json(problem)):
        if text:
            raise OSError(f"rank {rank}: {text}")
