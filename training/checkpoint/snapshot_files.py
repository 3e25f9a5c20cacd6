"""Owns the files of a rank's snapshots in a node's memory, and writes them again for later snapshots.

The kernel takes seven times as long to provide memory for a new file as to copy a state into a file that exists. So a
rank has three files, and maps each of them into its memory: two hold the kept snapshots, the third receives the next.
"""

import json
import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint.host_copy import HostCopy, HostMemory, shaped, spec_of
from training.checkpoint.sharded import ShardLayout
from training.relay.checkpoint_files import (
    KEPT_SNAPSHOTS,
    list_checkpoints,
    make_private,
    new_unpublished,
    remove_published,
    save_snapshot,
    step_of,
    unpublish,
)
from training.runtime.compat import copy_each


@dataclass(kw_only=True)
class SnapshotFile:
    """A directory for a snapshot, with the file of the tensors."""

    directory: Path
    layout: ShardLayout
    memory: HostMemory
    """The tensors. They are the file's content: a change of one changes the other."""

    def fits(self, tensors: Mapping[str, Tensor], layout: ShardLayout) -> bool:
        """Return whether the file still exists, and holds tensors of these names."""
        is_same = self.layout == layout and self.memory.tensors.keys() == tensors.keys()
        return is_same and (self.directory / layout.file).exists()


class SnapshotFiles:
    """The files of a rank's snapshots, all below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: dict[int, SnapshotFile] = {}
        self._next: SnapshotFile | None = None

    @property
    def are_allocated(self) -> bool:
        """Whether the next snapshot needs no more memory."""
        return len(self._kept) + (self._next is not None) > KEPT_SNAPSHOTS

    def next(self, tensors: Mapping[str, Tensor], layout: ShardLayout) -> SnapshotFile:
        """Return the file for the next snapshot. The tensors, which may be on a device, always have the same shapes.

        Raises:
            OSError: the file cannot be made, for example because the node's memory is full.
        """
        if self._next and not self._next.fits(tensors, layout):
            remove_published(self._next.directory)
            self._next = None
        if not self._next:
            self._next = _make(new_unpublished(self._directory), tensors, layout)
        return self._next

    def save(self, step: int, copy: HostCopy) -> None:
        """Save a complete copy as a snapshot, and keep the newest two.

        Raises:
            OSError: the snapshot could not be saved. All older ones are kept.
        """
        file, tensors = self.next(copy.memory.tensors, copy.layout), copy.memory.tensors
        if file.memory is not copy.memory:
            copy_each([file.memory.tensors[name] for name in tensors], list(tensors.values()))
        self._next = None
        save_snapshot(self._directory, step, copy.write_values, reused=file.directory, remove=self._reuse)
        # Forget what other processes have removed: the map would keep its memory.
        left = {step_of(path) for path in list_checkpoints(self._directory)}
        self._kept[step] = file
        self._kept = {kept: self._kept[kept] for kept in self._kept.keys() & left}

    def _reuse(self, path: Path) -> None:
        """Make the file of an outdated snapshot the next one, or remove the snapshot if it is an earlier attempt's."""
        file = self._kept.pop(step_of(path), None)
        if not file or self._next:
            remove_published(path)
            return
        with suppress(OSError):  # somebody has removed it
            file.directory, self._next = unpublish(path), file


def _make(directory: Path, tensors: Mapping[str, Tensor], layout: ShardLayout) -> SnapshotFile:
    """Make a file for tensors of these shapes, with any content, and map it into memory.

    All of it is written: if a node's memory were full, a write to a hole in a mapped file would kill the process. (So
    would any write if the directory were on a full disk of Btrfs or ZFS, which copy on write.)
    """
    anything = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    try:
        make_private(directory)
        layout.write({name: spec_of(each, anything) for name, each in tensors.items()}, directory, replicated=True)
        with (directory / layout.file).open("r+b") as file:
            content = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
            first = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(first - 8))
    except BaseException:
        remove_published(directory)
        raise
    memory = {name: shaped(content[first + header[name]["data_offsets"][0] :], each) for name, each in tensors.items()}
    return SnapshotFile(directory=directory, layout=layout, memory=HostMemory(memory))
