"""Copies each node's shards to the memory of the next node, so that a lost node loses none. Runs on every rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..rank_exchange import RankGroup
from .holders import Holders
from .restoring import shard_directory
from .snapshot_files import SnapshotFiles

if TYPE_CHECKING:
    from .tensor_files import Image


class NeighbourCopies:
    """What this rank sends to the next node, and keeps for the previous one."""

    def __init__(self, snapshots: Path, peers: RankGroup) -> None:
        """`peers` connects the threads that call `exchange`."""
        self._snapshots, self._peers = snapshots, peers
        self._kept: dict[int, SnapshotFiles] = {}
        """By rank, the files for the copies that this rank keeps."""

    def missing_bytes(self, holders: Holders, sizes: list[int]) -> int:
        """Return the bytes of memory that the next copies need. `sizes` are those of all ranks' files."""
        return sum(
            self._files_of(other, holders).missing_bytes(sizes[other]) for other in holders.kept_by(self._peers.rank)
        )

    def _files_of(self, other: int, holders: Holders) -> SnapshotFiles:
        directory = shard_directory(self._snapshots, holders.shards[other], holders.count)
        if other not in self._kept or self._kept[other].directory != directory:
            self._kept[other] = SnapshotFiles(directory)
        return self._kept[other]

    def exchange(
        self, step: int, holders: Holders, image: "Image | None", others: Mapping[str, bytes], problem: str,
        *, sends: bool,
    ) -> None:  # fmt: skip
        """Send this rank's snapshot, and save those of the previous node. All ranks must call this.

        Args:
            step: of the snapshot.
            holders: the shards of all ranks.
            image: the complete snapshot of this rank; None if it has none.
            others: the other files of the snapshot, equal on all ranks.
            problem: why this rank has no snapshot although it should, or an empty text.
            sends: whether to send the snapshots, or only to wait until all ranks have theirs.

        Raises:
            OSError: on all ranks, if a rank has no snapshot or could not keep a copy.
        """
        from torch import distributed

        rank = self._peers.rank
        sizes = self._peers.all_gather_json(image.size_bytes if image and sends and not problem else 0)
        message = None
        if image and sizes[rank] and rank in holders.keepers:
            message = distributed.isend(image.data, holders.keepers[rank], group=self._peers.control)
        for other in filter(sizes.__getitem__, holders.kept_by(rank)):
            try:
                self._receive(step, other, self._files_of(other, holders), sizes[other], others)
            except OSError as error:
                problem = problem or str(error) or repr(error)
        if message:
            message.wait()
        for number, text in enumerate(self._peers.all_gather_json(problem)):
            if text:
                raise OSError(f"rank {number}: {text}")

    def _receive(
        self, step: int, other: int, files: SnapshotFiles, size_bytes: int, others: Mapping[str, bytes]
    ) -> None:
        """Receive a snapshot and publish it. Raises OSError, once it is received, if it cannot be kept."""
        import torch
        from torch import distributed

        problem: OSError | None = None
        try:
            data = files.image(size_bytes).data
        except OSError as error:
            data, problem = torch.empty(size_bytes, dtype=torch.uint8), error
        distributed.recv(data, other, group=self._peers.control)
        if problem:
            raise problem
        files.publish(step, lambda directory: write_all(directory, others))


def write_all(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name. Raises OSError if one cannot be written."""
    for name, content in contents.items():
        (directory / name).write_bytes(content)
