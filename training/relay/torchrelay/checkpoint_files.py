"""Owns the directories of saved states, such as `step-00001200/`: each is complete, with a manifest, or absent.

Ranks write them as checkpoints on shared storage and as snapshots in a node's memory. Node agents and the commands of
the login node read them. Imports no torch.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"
_NAME, _REJECTED = re.compile(r"step-(\d{8,})"), "rejected-"
# Suffixes of what is being written or removed, and of what is being replaced.
_UNFINISHED, _REPLACED = "tmp", "old"
# Errors of an fsync of a directory on file systems that do not support it.
_UNSUPPORTED = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
STATE_TENSORS, STATE_VALUES, RANKS = "state.safetensors", "state.json", "ranks.pt"
"""Files of a state: its tensors, its other values, and what each rank has of its own."""
KEPT_SNAPSHOTS = 2
"""Number of snapshots of a state in a node's memory, with the one that is being written."""


def publish_directory(
    path: Path, write_files: Callable[[Path], object], check: Callable[[], None] | None = None
) -> None:
    """Create or replace a directory of files. The old directory is deleted only after the new one has its name.

    `write_files` receives a new, empty directory, and need not flush its files. `check` is as for `publish`.

    Raises:
        OSError: a write failed, such as on a full disk. The old directory is unchanged, and no temporary one remains.
    """
    with _unpublished_directory(path) as temporary:
        write_files(temporary)
        publish(temporary, path, check)


@contextmanager
def _unpublished_directory(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Make a directory that is to be published at a path. Remove it at the end of the block if it is not published."""
    temporary = unpublished_name(path)
    try:
        temporary.mkdir(mode)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, path: Path, check: Callable[[], None] | None = None) -> None:
    """Flush a file or directory that has an `unpublished_name`, and rename it. The old one is deleted only after that.

    If a kill prevents the second rename, `find_published` returns the old one, and `remove_unpublished` restores it.
    `check` is called after the flush, which may take minutes. If it raises, nothing is published.
    """
    for written in (*temporary.rglob("*"), temporary):
        fsync(written)
    if check:
        check()
    # In one rename, a file can replace a file. A directory can replace only an empty one.
    old = unpublished_name(path, _REPLACED) if path.is_dir() or (path.exists() and temporary.is_dir()) else None
    if old:
        path.rename(old)
    temporary.rename(path)
    fsync(path.parent)
    if old:
        with suppress(OSError):
            _remove(old)


def find_published(path: Path) -> Path | None:
    """Return the path of a published file or directory, or of the old one after a kill in `publish`; None if absent."""
    return next((place for place in (path, *path.parent.glob(f".{path.name}.*.{_REPLACED}")) if place.exists()), None)


def unpublished_name(path: Path, ending: str = _UNFINISHED) -> Path:
    """Return a new name for a file or directory that is to be published at a path."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{ending}"


def fsync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk. A rename is durable once its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot flush directories; `hpc submit` has warned of them.
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def unpublish(path: Path) -> Path:
    """Give a published directory a temporary name, and return it. Raises OSError if the directory has gone."""
    return path.rename(unpublished_name(path))


def remove_published(path: Path) -> None:
    """Remove a published directory, ignoring errors.

    The directory is renamed first, so a kill leaves no incomplete one. `remove_unpublished` removes what a kill left.
    """
    with suppress(OSError):
        path = unpublish(path)
    shutil.rmtree(path, ignore_errors=True)


def remove_unpublished(parent: Path, pattern: str) -> None:
    """Remove temporary files and directories of killed processes; restore what was renamed but not replaced.

    `pattern` matches the names that are published in `parent`, such as `step-*`. `parent` need not exist.
    """
    for old in sorted(parent.glob(f".{pattern}.*.{_REPLACED}")):
        path = parent / old.name[1:].rsplit(".", 2)[0]
        if path.exists():
            _remove(old)
        else:
            old.rename(path)
    for unfinished in parent.glob(f".{pattern}.*.{_UNFINISHED}"):
        with suppress(OSError):
            _remove(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- saved states: `step-00001200/`, with a manifest ---


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the optimizer steps done, from the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(directory: Path) -> list[Path]:
    """Return all checkpoints, intact or damaged, from the highest step to the lowest. Other names are ignored."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def save_checkpoint(
    directory: Path, step: int, write_files: Callable[[Path], object], keep: int | None,
    *, check: Callable[[], None] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint as `publish_directory` writes a directory, and publish it as `publish_checkpoint` does."""
    directory.mkdir(exist_ok=True)
    with _unpublished_directory(checkpoint_path(directory, step), 0o700) as temporary:
        write_files(temporary)
        return publish_checkpoint(temporary, step, keep, check=check)


def publish_checkpoint(
    temporary: Path, step: int, keep: int | None, *, described: Mapping[str, Any] = {},
    check: Callable[[], None] | None = None,
) -> Path:  # fmt: skip
    """Publish a checkpoint that only its owner may read. Then delete all but the newest `keep`; None deletes nothing.

    `temporary` is a directory with an `unpublished_name`, among the checkpoints, and has the files. Those that are
    `described` by their manifest entries are not read again. `check` is as for `publish`.

    Raises:
        OSError: the checkpoint could not be written. All older ones are kept.
    """
    others = (file for file in sorted(temporary.iterdir()) if file.name not in {*described, _MANIFEST})
    files = {**described, **{file.name: describe_file(file) for file in others}}
    (temporary / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2))
    for file in temporary.iterdir():
        file.chmod(0o600)
    path = checkpoint_path(temporary.parent, step)
    publish(temporary, path, check)
    if keep is not None:
        for outdated in list_checkpoints(path.parent)[keep:]:
            remove_published(outdated)
        for rejected in path.parent.glob(f"{_REJECTED}*"):
            shutil.rmtree(rejected, ignore_errors=True)
    return path


def make_private(directory: Path) -> None:
    """Make a directory and its missing parents, which only their owner may read. Raises OSError."""
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def reject(path: Path) -> None:
    """Mark a damaged checkpoint as unusable. The next `save_checkpoint` deletes it."""
    path.rename(path.with_name(_REJECTED + path.name))


def write_all(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name. Raises OSError if one cannot be written."""
    for name, content in contents.items():
        (directory / name).write_bytes(content)


def describe_file(path: Path, *, hashed: bool = True) -> dict[str, Any]:
    """Return the manifest's entry for a file: its size and, if `hashed`, its hash."""
    size = {"size": path.stat().st_size}
    if not hashed:
        return size
    with path.open("rb") as file:
        return size | {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(path: Path, first: int = 0, stride: int = 1) -> str:
    """Return why a checkpoint is damaged, or an empty text if its files match the manifest.

    A rank that passes its rank as `first` and the world size as `stride` checks its share of the files.

    Raises:
        OSError: the storage cannot be read. The checkpoint may be intact.
    """
    try:
        for name, entry in sorted(manifest_entries(path).items())[first::stride]:
            if describe_file(path / name, hashed="sha256" in entry) != entry:
                return f"{name} is not as it was written"
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it does not match its manifest: {error!r}"
    return ""


def manifest_entries(path: Path) -> dict[str, Any]:
    """Return the manifest's entries for an intact checkpoint's files. Raises OSError if the storage cannot be read."""
    entries: dict[str, Any] = json.loads((path / _MANIFEST).read_bytes())["files"]
    return entries
