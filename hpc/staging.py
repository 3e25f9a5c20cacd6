"""Shared storage -> node-local disk: each node copies the data once, whole or not at all, and uses it again.

Runs on compute nodes, once per node, before torchrun starts and so outside any collective. The copy lies in
`<stage-dir>/torchrelay-<uid>/`, which nobody else can write: /tmp belongs to everybody.
"""

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import TorchrelayError
from hpc.files import fsync_directory, write_json
from hpc.private import open_lock, private_directory, try_lock

_MANIFEST = ".torchrelay-manifest.json"
_CHUNK_BYTES = 8 * 2**20
_POLL_SECONDS = 0.2
# Beside the copy the node's disk has to hold other people's files, and what the job itself writes to /tmp.
_RESERVE_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Where the data are to be read on this node."""

    path: Path
    reused: bool
    in_place: str | None
    """Why they are read from shared storage after all; None if they were staged."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of the data set."""

    name: str
    size: int
    modified_ns: int


class StagingStopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """Staging was asked to stop. What it had copied is not used; the next one removes it."""


def stage(source: Path, stage_dir: Path, stopped: Callable[[], bool] = lambda: False) -> Staged:
    """Make sure that a copy of `source` lies on this node's disk.

    `stopped` is asked every few megabytes: a signal in the middle of an hour's copy must not wait for its end.

    Raises:
        StagingStopped: it said yes.
        TorchrelayError: the source is not there, our directory is not safe to use, or the copy differs.
    """
    began = time.monotonic()
    if not source.is_dir():
        raise TorchrelayError(f"the data, {source}, are not to be seen on this node: keep them on shared storage")
    files = list_files(source)
    root = private_directory(stage_dir)
    target = root / f"{source.name}-{fingerprint(source, files)}"
    with lock(root / f"{target.name}.lock", stopped):
        if is_complete(target, files):
            return Staged(path=target, reused=True, in_place=None, seconds=time.monotonic() - began)
        remove_leftovers(root, target)
        shortage = missing_space(root, files)
        if shortage:
            return Staged(path=source, reused=False, in_place=shortage, seconds=time.monotonic() - began)
        try:
            copy_verified(source, target, files, stopped)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            remove_leftovers(root, target)
            return Staged(path=source, reused=False, in_place=str(error), seconds=time.monotonic() - began)
    return Staged(path=target, reused=False, in_place=None, seconds=time.monotonic() - began)


def list_files(source: Path) -> list[SourceFile]:
    """Every file below a directory, in a fixed order; links are followed."""
    found = []
    for directory, subdirectories, names in os.walk(source, followlinks=True):
        subdirectories.sort()
        for name in sorted(names):
            path = Path(directory, name)
            status = path.stat()
            found.append(
                SourceFile(name=str(path.relative_to(source)), size=status.st_size, modified_ns=status.st_mtime_ns)
            )
    return found


def fingerprint(source: Path, files: list[SourceFile]) -> str:
    """Names a version of a data set: another path, file, size or time is another copy."""
    text = json.dumps([str(source), [[file.name, file.size, file.modified_ns] for file in files]])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


@contextmanager
def lock(path: Path, stopped: Callable[[], bool]) -> Iterator[None]:
    """Only one process of this node copies at a time. The kernel releases the lock of one that is killed."""
    descriptor = open_lock(path)
    try:
        while not try_lock(descriptor):
            if stopped():
                raise StagingStopped
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def is_complete(target: Path, files: list[SourceFile]) -> bool:
    """Whether an earlier attempt left the whole copy here."""
    return target.is_dir() and all(_has_size(target / file.name, file.size) for file in files)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def remove_leftovers(root: Path, target: Path) -> None:
    """Delete what a killed copy left, and a copy that has lost files (node-local disks are swept)."""
    for leftover in (*root.glob(f".{glob_escape(target.name)}.*.partial"), target):
        if leftover.exists():
            shutil.rmtree(leftover)


def glob_escape(name: str) -> str:
    """A directory's name as a literal inside a glob."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def missing_space(root: Path, files: list[SourceFile]) -> str | None:
    """Why the copy would not fit, or None."""
    needed = sum(file.size for file in files)
    usage = shutil.disk_usage(root)
    room = usage.free - int(usage.total * _RESERVE_SHARE)
    if needed <= room:
        return None
    return f"{root} has room for {max(room, 0) // 2**20} MB, and the data need {needed // 2**20} MB"


def copy_verified(source: Path, target: Path, files: list[SourceFile], stopped: Callable[[], bool]) -> None:
    """Copy under a temporary name, read everything back, and only then give it its name."""
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir(mode=0o700)
    checksums = {file.name: _copy_file(source / file.name, partial / file.name, stopped) for file in files}
    for name, checksum in checksums.items():
        if _checksum(partial / name) != checksum:
            raise TorchrelayError(f"{partial / name} does not equal {source / name}: is the disk of this node failing?")
    write_json(partial / _MANIFEST, {file.name: [file.size, checksums[file.name]] for file in files})
    partial.rename(target)
    fsync_directory(target.parent)


def _copy_file(source: Path, target: Path, stopped: Callable[[], bool]) -> str:
    """Copy one file and return the checksum of what was read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            if stopped():
                raise StagingStopped
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
