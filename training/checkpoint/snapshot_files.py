"""Owns the files of snapshots in a node's memory, and writes them again for later snapshots. Runs on every rank.

The kernel takes seven times as long to provide memory for a new file as to copy a state into a file that exists. So a
rank has three files for its state, and maps each of them into its memory: two hold the kept snapshots, the third
receives the next. With FSDP, it has three more for the shards of each rank whose copies it keeps.
"""

import json
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrelay.checkpoint_files import (
    KEPT_SNAPSHOTS,
    checkpoint_path,
    make_private,
    new_unpublished,
    remove_published,
    save_snapshot,
    step_of,
    unpublish,
)

from training.checkpoint.host_copy import HostCopy, HostMemory, shaped, spec_of
from training.checkpoint.sharded import ShardLayout
from training.runtime.compat import copy_each


@dataclass(kw_only=True)
class _File:
    """A directory for a snapshot, with a file that is mapped into memory."""

    directory: Path
    name: str
    content: Any
    """Describes what the file can hold."""
    memory: HostMemory
    """Tensors that are parts of the file: a change of one changes the other."""
    inode: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember which file is mapped."""
        self.inode = (self.directory / self.name).stat().st_ino

    @property
    def exists(self) -> bool:
        """Whether nobody has removed the file."""
        try:
            return (self.directory / self.name).stat().st_ino == self.inode
        except OSError:
            return False


class SnapshotFiles:
    """The files of the snapshots in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._kept: dict[int, _File] = {}
        self._next: _File | None = None

    @property
    def are_allocated(self) -> bool:
        """Whether the next snapshot needs no more memory, unless somebody removes the files."""
        return len(self._kept) + (self._next is not None) > KEPT_SNAPSHOTS

    def for_state(self, tensors: Mapping[str, Tensor], layout: ShardLayout) -> HostMemory:
        """Return the next file's memory for tensors that may be on a device. Their shapes are always the same.

        Raises:
            OSError: the file cannot be made, for example because the node's memory is full.
        """
        return self._next_file(layout.file, (layout, frozenset(tensors)), partial(_make_for_state, tensors, layout))

    def for_bytes(self, name: str, size_bytes: int) -> Tensor:
        """Return the next file's memory for the bytes of another rank's file. Raises OSError as `for_state` does."""
        return self._next_file(name, size_bytes, partial(_make_for_bytes, name, size_bytes)).tensors[name]

    def _next_file(self, name: str, content: Any, make: Callable[[Path], dict[str, Tensor]]) -> HostMemory:
        file = self._next
        if file and file.exists and (file.name, file.content) == (name, content):
            return file.memory
        if file:
            shutil.rmtree(file.directory, ignore_errors=True)
        # Forget what somebody has removed: the maps would keep its memory.
        self._next, self._kept = None, {step: kept for step, kept in self._kept.items() if kept.exists}
        directory = new_unpublished(self.directory)
        try:
            make_private(directory)
            memory = HostMemory(make(directory))
            self._next = _File(directory=directory, name=name, content=content, memory=memory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return memory

    def save_state(self, step: int, copy: HostCopy) -> None:
        """Save a complete copy as a snapshot, and keep the newest two.

        Raises:
            OSError: the snapshot could not be saved. All older ones are kept.
        """
        tensors = copy.memory.tensors
        memory = self.for_state(tensors, copy.layout)
        if memory is not copy.memory:
            copy_each([memory.tensors[name] for name in tensors], list(tensors.values()))
            copy.memory = memory  # the other memory may be that of a file that somebody has removed
        self.save(step, copy.write_values)

    def save(self, step: int, write_values: Callable[[Path], None]) -> None:
        """Save the next file, whose memory has been written, as a snapshot. `write_values` writes the other files.

        Raises:
            OSError: the snapshot could not be saved. All older ones are kept.
        """
        file, outdated = self._next, list[Path]()
        if not file:
            raise ValueError("there is no file to save")

        def write(directory: Path) -> None:
            write_values(directory)
            if not file.exists:
                raise FileNotFoundError(f"{directory / file.name} was removed")

        save_snapshot(self.directory, step, write, reused=file.directory, remove=outdated.append)
        self._next, file.directory, self._kept[step] = None, checkpoint_path(self.directory, step), file
        for path in outdated:
            self._reuse(path)

    def _reuse(self, path: Path) -> None:
        """Make the file of an outdated snapshot the next one, or remove the snapshot if it is an earlier attempt's."""
        file = self._kept.pop(step_of(path), None)
        if not file or self._next:
            remove_published(path)
            return
        with suppress(OSError):  # somebody has removed it
            file.directory, self._next = unpublish(path), file


# The files are made with their full size: if a node's memory were full, a write to a hole in a mapped file would kill
# the process. (So would any write if the directory were on a full disk of Btrfs or ZFS, which copy on write.)


def _make_for_state(tensors: Mapping[str, Tensor], layout: ShardLayout, directory: Path) -> dict[str, Tensor]:
    """Make a file for tensors of these shapes, and return them with any content."""
    anything = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    layout.write({name: spec_of(each, anything) for name, each in tensors.items()}, directory, replicated=True)
    content = _mapped(directory / layout.file)
    first = 8 + int.from_bytes(content[:8].numpy(), "little")
    header = json.loads(content[8:first].numpy().tobytes())
    return {name: shaped(content[first + header[name]["data_offsets"][0] :], each) for name, each in tensors.items()}


def _make_for_bytes(name: str, size_bytes: int, directory: Path) -> dict[str, Tensor]:
    with (directory / name).open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return {name: _mapped(directory / name)}


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
