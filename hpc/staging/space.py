"""Room for a copy on this node's disk. Runs on compute nodes."""

import os
import shutil
from pathlib import Path

from hpc.core.kernel import available_memory_bytes
from hpc.core.node_info import file_system_type
from hpc.staging.store import CacheStore

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
# Beside the copy the node's disk has to hold other people's files, and what the job itself writes to /tmp.
_RESERVE_SHARE = 0.05
# Of the memory that is free: a copy in memory counts as the job's, and the ranks need some, too.
_MEMORY_SHARE = 0.5
# A file takes whole blocks, and an inode.
_FILE_BYTES = 4096 + 512


def is_memory(directory: Path) -> bool:
    """Whether files there take memory, not disk."""
    return file_system_type(directory) in IN_MEMORY


def room(directory: Path) -> int:
    """Bytes that a copy may take."""
    usage = shutil.disk_usage(directory)
    free = usage.free - int(usage.total * _RESERVE_SHARE)
    if is_memory(directory):
        free = min(free, int(available_memory_bytes() * _MEMORY_SHARE))
    return max(0, free)


def needed(size: int, files: int) -> int:
    """Bytes that so many files of so many bytes together take on a disk."""
    return size + files * _FILE_BYTES


def shortage(directory: Path, size: int, files: int) -> str | None:
    """Why a copy would not fit, or None."""
    bytes_needed, bytes_free = needed(size, files), room(directory)
    inodes = os.statvfs(directory)
    if inodes.f_files and files > inodes.f_favail:
        return f"{directory} has {inodes.f_favail} inodes left, and the data are {files} files"
    if bytes_needed <= bytes_free:
        return None
    kind = ", which is memory," if is_memory(directory) else ""
    return f"{directory}{kind} has room for {bytes_free // 2**20} MB, and the data need {bytes_needed // 2**20} MB"


def make_room(store: CacheStore, size: int, files: int) -> tuple[list[str], str | None]:
    """Delete old copies, if that helps. Returns their names, and why there is no room after all.

    Args:
        store: the copies that are there.
        size: bytes of the new one.
        files: how many these are.
    """

    def missing() -> int:
        return needed(size, files) - room(store.root)

    deleted = list[str]()
    if 0 < missing() <= sum(entry.size() for entry in store.entries() if not entry.in_use()):
        deleted = store.make_room(missing)
    return deleted, shortage(store.root, size, files)
