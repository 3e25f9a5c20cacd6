"""Directories that appear whole or not at all. Runs on rank 0.

They are filled under a temporary name, flushed to the disk, and renamed. What
a killed attempt left behind under temporary names is removed by the next one.
"""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from hpc.core.files import fsync_directory

_UNFINISHED, _REPLACED = "tmp", "old"


def publish(path: Path, fill: Callable[[Path], None], mode: int | None = None) -> None:
    """Create or replace a directory of files. An older one is deleted after the new one is in its place.

    Args:
        path: the directory.
        fill: is given an empty directory to write the files into; the writing need not be durable.
        mode: of the directory, and of its files as far as it suits files; by default as the process makes them.

    Raises:
        OSError: the disk is full, for example. Nothing is left behind, and an older directory is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, _UNFINISHED)
    try:
        temporary.mkdir(mode=0o777 if mode is None else mode)
        fill(temporary)
        for file in temporary.iterdir():
            if mode is not None:
                file.chmod(mode & 0o666)
            flush(file)
        fsync_directory(temporary)
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _aside(path: Path, ending: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{ending}"


def flush(path: Path) -> None:
    """Have a file's bytes on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(new: Path, path: Path) -> None:
    """A directory cannot be renamed onto a full one: the old one steps aside first."""
    old = _aside(path, _REPLACED) if path.exists() else None
    if old:
        path.rename(old)
    new.rename(path)
    fsync_directory(path.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def sweep(parent: Path, pattern: str) -> None:
    """Remove what killed writers of `pattern` left in `parent`, and put back what had stepped aside for nothing.

    Args:
        parent: the directory to clean; it need not exist.
        pattern: the names that are published there, such as `step-*`.
    """
    for old in sorted(parent.glob(f".{pattern}.*.{_REPLACED}")):
        path = parent / old.name[1:].rsplit(".", 2)[0]
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    for unfinished in parent.glob(f".{pattern}.*.{_UNFINISHED}"):
        shutil.rmtree(unfinished)
