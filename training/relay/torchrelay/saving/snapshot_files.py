"""Owns the files of snapshots in a node's memory, and writes them again for later snapshots. Runs on every rank.

The kernel takes seven times as long to provide memory for a new file as to copy a state into a file that exists. So a
directory has two files, each mapped into memory: one holds the newest snapshot while the other receives the next. Until
then, the other holds the snapshot before.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..checkpoint_files import (
    KEPT_SNAPSHOTS,
    STATE_TENSORS,
    checkpoint_path,
    list_checkpoints,
    make_private,
    remove_published,
    save_snapshot,
    unpublish,
    unpublished_name,
    write_all,
)
from .tensor_files import Image


class SnapshotFiles:
    """The files of the snapshots in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The published snapshots of this process, the older one first, and the next one. Each has its directory.
        self._published = list[tuple[Path, Image]]()
        self._next: tuple[Path, Image] | None = None

    def image(self, size_bytes: int) -> Image:
        """Return the memory of the next snapshot. The older one of two snapshots is no more published then.

        Raises:
            OSError: the file cannot be made, for example because the node's memory is full.
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

        def write(directory: Path) -> None:
            write_all(directory, others)
            if not image.is_at(directory / STATE_TENSORS):
                raise FileNotFoundError(f"{directory / STATE_TENSORS} was removed")

        save_snapshot(self.directory, step, write, reused=directory)
        self._next = None
        self._published.append((checkpoint_path(self.directory, step), image))
