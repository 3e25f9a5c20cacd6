"""Writes a rank's snapshots to its node's memory, and its shard to the next node's, so that a lost node loses none."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoint_files import KEPT_SNAPSHOTS, STATE_TENSORS, make_private, remove_published
from ..node_memory import lacking_space
from ..rank_exchange import RankGroup, reason_of
from .holders import Holders
from .owner import Owner
from .restoring import shard_directory
from .snapshot_files import SnapshotFiles
from .tensor_files import Image


class NodeSnapshots:
    """The snapshots that this rank writes: its own, and copies of those of ranks of the previous node."""

    def __init__(
        self, directory: Path, holders: Holders, peers: RankGroup, background_peers: RankGroup, owner: Owner
    ) -> None:
        """`directory` is this node's. `background_peers` connects the threads that call `publish`."""
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
                self._owner.snapshot_saved(step, self._node_bytes)

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
