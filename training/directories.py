"""Directories that appear whole or not at all. Runs on rank 0.

The files are written into a directory with a temporary name, flushed to the disk, and the directory is renamed. What
a killed attempt left behind under temporary names is removed by the next one.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from hpc.files import fsync_directory

_UNFINISHED, _REPLACED = "tmp", "old"


def publish(path: Path, files: Mapping[str, bytes]) -> None:
    """Create or replace a directory with these files. An older one is deleted after the new one is in its place.

    Raises:
        OSError: the disk is full, for example. Nothing is left behind, and an older directory is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, _UNFINISHED)
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write_durably(temporary / name, data)
        fsync_directory(temporary)
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _aside(path: Path, ending: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{ending}"


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
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
