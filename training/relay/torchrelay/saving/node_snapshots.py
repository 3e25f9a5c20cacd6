"""Keeps a rank's snapshots in its node's memory, and a copy of its shard on the next node for when this node is lost.

A rank's shard is what it holds of the state. With DDP, all ranks have the same shard: the whole state. With FSDP, each
rank has its own, or each node has all of them (hybrid).

The kernel takes seven times as long to provide memory for a new file as to copy a state into a file that exists. So a
directory has two files, each mapped into memory: one holds the newest snapshot while the other receives the next. Until
then, the other holds the snapshot before.
"""

import shutil
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..checkpoint_files import (
    KEPT_SNAPSHOTS,
    STATE_TENSORS,
    checkpoint_path,
    describe_file,
    list_checkpoints,
    make_private,
    publish_checkpoint,
    remove_published,
    unpublish,
    unpublished_name,
    write_all,
)
from ..node_memory import lacking_space
from ..progress_files import progress_files
from ..rank_exchange import RankGroup, reason_of
from .owner import Owner
from .restoring import shard_directory
from .tensor_files import Image


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


class SnapshotFiles:
    """The files of the snapshots in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The published snapshots of this process, the older one first, and the next one. Each has its directory.
        self._published = list[tuple[Path, Image]]()
        self._next: tuple[Path, Image] | None = None

    def image(self, size_bytes: int) -> Image:
        """Return the memory of the next snapshot. The older one of two snapshots is no more published then.

        Raises OSError if the file cannot be made, for example because the node's memory is full.
        """
        # Forget what somebody has removed: the maps would keep its memory.
        self._published = [(path, image) for path, image in self._published if image.is_at(path / STATE_TENSORS)]
        own = [path for path, _ in self._published]
        others = [path for path in list_checkpoints(self.directory) if path not in own]
        for path in others[max(0, KEPT_SNAPSHOTS - 1 - len(own)) :]:
            remove_published(path)  # an earlier attempt's, whose process may still map it
        if not self._next and len(own) >= KEPT_SNAPSHOTS:
            path, image = self._published.pop(0)
            with suppress(OSError):  # somebody has removed it
                self._next = unpublish(path), image
        if self._next:
            directory, image = self._next
            if image.size_bytes == size_bytes and image.is_at(directory / STATE_TENSORS):
                return image
            self._next = None
            shutil.rmtree(directory, ignore_errors=True)
        make_private(self.directory)
        directory = unpublished_name(checkpoint_path(self.directory, 0))
        try:
            directory.mkdir(mode=0o700)
            self._next = directory, Image(size_bytes, directory / STATE_TENSORS)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return self._next[1]

    def publish(self, step: int, others: Mapping[str, bytes]) -> None:
        """Publish the next snapshot, whose memory has been written, with the other files of the state.

        Raises:
            OSError: the snapshot could not be saved. The newest one is kept.
        """
        if not self._next:
            raise ValueError("no snapshot is to be published")
        directory, image = self._next
        write_all(directory, others)
        if not image.is_at(directory / STATE_TENSORS):
            raise FileNotFoundError(f"{directory / STATE_TENSORS} was removed")
        # Hashing would take longer than writing, and no crash tears a file that the memory of a live node holds.
        described = {name: describe_file(directory / name, hashed=False) for name in (STATE_TENSORS, *others)}
        path = publish_checkpoint(directory, step, KEPT_SNAPSHOTS, described=described)
        self._next = None
        self._published.append((path, image))


class NodeSnapshots:
    """The snapshots that this rank writes: its own, and copies of those of ranks of the previous node."""

    def __init__(
        self, directory: Path, holders: Holders, peers: RankGroup, background_peers: RankGroup, owner: Owner
    ) -> None:
        """`directory` is for snapshots of this node; `background_peers` joins the threads that call `publish`."""
        self._directory, self._holders, self._owner = directory, holders, owner
        self._peers, self._background_peers = peers, background_peers
        own = [peers.rank] if peers.rank in holders.snapshot_writers else []
        self._files = {rank: SnapshotFiles(self._directory_of(rank)) for rank in [*own, *holders.kept_by(peers.rank)]}
        """By rank, the files for the snapshots of its shard."""
        self._of_node = holders.ranks_of(holders.node_of(peers.rank))
        self._image: Image | None = None
        self._problem = ""
        """Why this rank should have the next snapshot but has none, or an empty text."""
        self._sends = False
        """Whether nodes send the next snapshot to the next node."""
        self._node_bytes = 0
        self._has_removed_others = False
        self.sending_seconds = 0.0
        """Seconds for which the last snapshot used the network."""

    def _directory_of(self, rank: int) -> Path:
        return shard_directory(self._directory, self._holders.shards[rank], self._holders.count)

    # --- in the thread that trains ---

    def prepare(self, sizes: Sequence[int]) -> Image | None:
        """Return the memory of this rank's next snapshot. None if another rank writes it, or if memory is lacking.

        `sizes` are the bytes of all ranks' files. If the state has several shards, all ranks must call this.
        """
        rank, holders = self._peers.rank, self._holders
        written = [other for other in self._of_node if other in holders.snapshot_writers]
        kept = [sender for other in self._of_node for sender in holders.kept_by(other)]
        self._node_bytes = KEPT_SNAPSHOTS * sum(sizes[other] for other in written + kept)
        self._image, own = None, self._files.get(rank)
        if holders.count == 1:
            self._problem = self._lacking(written, sizes) if own else ""
        else:
            # The first rank of a node decides for it: while others look, ranks of the node already take the memory.
            mine = []
            if rank == self._of_node[0]:
                mine = [self._lacking(written, sizes), self._lacking(written + kept, sizes)]
            answers = self._peers.all_gather_json(mine)
            self._problem = answers[self._of_node[0]][0] if own else ""
            without_copies = next((answers[first][1] for first in holders.nodes if answers[first][1]), "")
            self._sends = bool(holders.keepers) and not without_copies
            if holders.keepers and without_copies:
                self._warn_of_copies(without_copies)
        if own and not self._problem:
            try:
                self._image = own.image(sizes[rank])
            except OSError as error:
                self._problem = reason_of(error)
        self._warn_if_off()
        return self._image

    def _lacking(self, ranks: Sequence[int], sizes: Sequence[int]) -> str:
        """Return why the node's memory cannot take the snapshots of ranks' shards, or an empty text."""
        missing = 0
        try:
            for rank in ranks:
                files = self._directory_of(rank).glob(f"*/{STATE_TENSORS}")
                missing += max(0, KEPT_SNAPSHOTS * sizes[rank] - sum(file.stat().st_size for file in files))
            if missing:
                make_private(self._directory)
                return lacking_space(self._directory, missing)
        except OSError as error:
            return reason_of(error)
        return ""

    def _warn_if_off(self) -> None:
        if self._problem and self._owner.warn_once("snapshots are off on this node", self._problem, "a crash"):
            self._owner.event("snapshot_off", reason=self._problem)

    def _warn_of_copies(self, reason: str) -> None:
        if self._peers.is_rank_zero:
            self._owner.warn_once("snapshots have no copies on other nodes", reason, "a lost node")

    # --- in the background thread ---

    def publish(self, step: int, others: Mapping[str, bytes]) -> None:
        """Publish the prepared snapshot, whose memory is written, and send it to the next node.

        `others` are the other files of the state, equal on all ranks. If the state has several shards, all ranks must
        call this. The snapshot before is overwritten only by the next one: until then, all nodes have a snapshot.
        """
        rank, problem = self._peers.rank, self._problem
        if self._image:
            try:
                self._files[rank].publish(step, others)
            except OSError as error:
                problem = self._problem = reason_of(error)
                self._warn_if_off()
        if self._holders.count > 1:
            problem = self._exchange(step, others)
        if not problem:
            self.remove_others()
            if self._image and self._peers.is_rank_zero:
                progress_files.snapshot(step, self._node_bytes)

    def _exchange(self, step: int, others: Mapping[str, bytes]) -> str:
        """Send this rank's snapshot and receive others, or only wait until all ranks have theirs.

        Returns on all ranks why a rank has no snapshot or could not keep a copy, or an empty text.
        """
        from torch import distributed

        began, rank, peers, problem = time.monotonic(), self._peers.rank, self._background_peers, self._problem
        image = self._image if self._sends and not problem else None
        sizes = peers.all_gather_json(image.size_bytes if image else 0)
        message = None
        if image and rank in self._holders.keepers:
            message = distributed.isend(image.data, self._holders.keepers[rank], group=peers.control)
        for other in filter(sizes.__getitem__, self._holders.kept_by(rank)):
            try:
                self._receive(step, other, sizes[other], others)
            except OSError as error:
                problem = problem or reason_of(error)
        if message:
            message.wait()
        problems = enumerate(peers.all_gather_json(problem))
        found = next((f"rank {number}: {text}" for number, text in problems if text), "")
        if found and self._sends:
            self._warn_of_copies(found)
        self.sending_seconds = time.monotonic() - began if self._sends else 0.0
        return found

    def _receive(self, step: int, other: int, size_bytes: int, others: Mapping[str, bytes]) -> None:
        """Receive a snapshot and publish it. Raises OSError, once it is received, if it cannot be kept."""
        import torch
        from torch import distributed

        problem: OSError | None = None
        try:
            data = self._files[other].image(size_bytes).data
        except OSError as error:
            data, problem = torch.empty(size_bytes, dtype=torch.uint8), error
        distributed.recv(data, other, group=self._background_peers.control)
        if problem:
            raise problem
        self._files[other].publish(step, others)

    def remove_others(self) -> None:
        """Remove this node's snapshots of other shards: ranks of another number, or another strategy, wrote them."""
        if self._has_removed_others or self._peers.local_rank != 0:
            return
        self._has_removed_others = True
        held = {*self._of_node, *(sender for rank in self._of_node for sender in self._holders.kept_by(rank))}
        directories = set(map(self._directory_of, held))
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            if path not in directories and (self._holders.count > 1 or path.name.startswith("shard-")):
                remove_published(path)
