"""Chooses the files of the user's directory that a run copies: what git tracks, and small sources. Login node.

A run copies the user's code, so that later edits do not change the run: the files that git tracks, and the small
sources and configurations that git neither tracks nor ignores. Without git, it copies the small ones alone. Limits on
numbers and sizes of files keep this quick in any directory, such as a home directory or one with millions of images.
"""

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc.base import git
from hpc.base.errors import TorchrelayError

_SOURCES = frozenset({".py", ".pyx", ".pxd", ".sh", ".bash", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh"})
_CONFIGURATIONS = frozenset({".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".conf", ".gin"})
# Directories that have configurations, although they have no sources.
_OF_CONFIGURATIONS = ("conf", "cfg")
# A larger file is data.
_LARGEST_TRACKED_BYTES, _LARGEST_SOURCE_BYTES = 16 * 2**20, 2**20
# A directory with more entries holds data. Several with more entries or bytes are not those of one project.
_MOST_IN_DIRECTORY, _MOST_ENTRIES, _MOST_BYTES = 1000, 10_000, 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class CodeSources:
    """The files to copy, by their paths relative to a directory."""

    tracked: frozenset[str] = frozenset()
    small: frozenset[str] = frozenset()
    """Small sources and configurations that git does not track."""
    problem: str | None = None
    """Why git did not answer, although the directory is a repository's; None if it answered or was not asked."""


def find_sources(root: Path, is_left_out: Callable[[os.DirEntry[str]], bool]) -> CodeSources:
    """Return the files below `root` to copy; `root` is a repository's top if it has `.git`.

    `is_left_out` says which entries of directories no run sees.
    """
    if not (root / ".git").exists():
        return CodeSources(small=_small_files(root, [""], is_left_out))
    try:
        tracked = git.listed_files(root)
        others = git.listed_files(root, "--others", "--exclude-standard", "--directory", "--no-empty-directory")
        # git does not list what is in an untracked directory; what it would ignore there is copied, too.
        below = _small_files(root, [name[:-1] for name in others if name.endswith("/")], is_left_out)
    except TorchrelayError as error:
        return CodeSources(small=_small_files(root, [""], is_left_out), problem=str(error))
    small = {*below, *(name for name in others if is_source(root / name))}
    return CodeSources(tracked=frozenset(name for name in tracked if _is_copied(root / name)), small=frozenset(small))


def is_source(path: Path) -> bool:
    """Return whether a path names a small source or configuration, not by a link, that this user can read."""
    return _kind(path.name) is not None and _is_readable(path, _LARGEST_SOURCE_BYTES)


def is_configuration(name: str) -> bool:
    """Return whether a file has the suffix of a configuration."""
    return _kind(name) is _CONFIGURATIONS


def _kind(name: str) -> frozenset[str] | None:
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - there are thousands of names
    return next((kind for kind in (_SOURCES, _CONFIGURATIONS) if suffix in kind), None)


def _is_readable(path: Path | os.DirEntry[str], most_bytes: int) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False  # deleted or moved, but git still tracks it
    return stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes and os.access(path, os.R_OK)


def _is_copied(path: Path) -> bool:
    """Return whether a tracked path is a link, or a readable file that is not too large. A submodule is a directory."""
    return path.is_symlink() or _is_readable(path, _LARGEST_TRACKED_BYTES)


def _small_files(
    root: Path, directories: Iterable[str], is_left_out: Callable[[os.DirEntry[str]], bool]
) -> frozenset[str]:
    """Return the small sources and configurations in and below directories.

    If there are too many, the directories are not those of one project but, for example, a home directory: return only
    what lies in the directories themselves. A configuration counts only beside a source, at the top, or below a
    directory that is named after configurations: elsewhere, a JSON or YAML file is a result.
    """
    levels, seen, size = list[list[str]](), 0, 0
    waiting = [(directory, directory == "") for directory in directories]
    while waiting:
        level, waiting = waiting, []
        levels.append([])
        for directory, has_configurations in level:
            entries = scan(root / directory, _MOST_IN_DIRECTORY)
            seen += len(entries)
            if seen > _MOST_ENTRIES or size > _MOST_BYTES:
                return frozenset(levels[0])
            if len(entries) > _MOST_IN_DIRECTORY and directory:
                continue
            entries = [entry for entry in entries if not entry.name.startswith(".") and not is_left_out(entry)]
            is_conf = has_configurations or Path(directory).name.lower().startswith(_OF_CONFIGURATIONS)
            takes_all = is_conf or any(_kind(entry.name) is _SOURCES for entry in entries)
            kinds = (_SOURCES, _CONFIGURATIONS) if takes_all else (_SOURCES,)
            for entry in entries:
                path = os.path.join(directory, entry.name)  # noqa: PTH118 - there are thousands of names
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((path, is_conf and directory != ""))
                elif _kind(entry.name) in kinds and _is_readable(entry, _LARGEST_SOURCE_BYTES):
                    levels[-1].append(path)
                    size += entry.stat().st_size
    return frozenset(name for names in levels for name in names)


def scan(directory: Path, most: int) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, but at most one more than `most`; none if it cannot be listed."""
    try:
        with os.scandir(directory) as listing:
            return list(islice(listing, most + 1))
    except OSError:
        return []
