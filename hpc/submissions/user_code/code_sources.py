"""Chooses the files of the user's directory that a run copies: what git tracks, and small sources. Login node.

A run copies what an edit must not change later: the files that git tracks, and the small sources and configurations
that git neither tracks nor ignores. Without git, it copies the small sources and configurations alone. The bounds keep
the choice quick in any directory, such as a home directory or one with millions of images.
"""

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
# A directory with more entries holds data.
_MOST_IN_DIRECTORY = 1000
_MOST_ENTRIES, _MOST_FILES, _MOST_BYTES, _MOST_LEVELS = 10_000, 2000, 32 * 2**20, 8


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
        directories = [name for name in others if name.endswith("/")]
        below = sorted(_small_files(root, directories, is_left_out))
        # git does not list what is in an untracked directory, and so not what it ignores there.
        ignored = git.ignored_files(root, below) if below else set()
    except TorchrelayError as error:
        return CodeSources(small=_small_files(root, [""], is_left_out), problem=str(error))
    single = [name for name in others if _kind(name) and _is_small(root / name)]
    return CodeSources(
        tracked=frozenset(name for name in tracked if _is_copied(root / name)),
        small=frozenset({*single, *below} - ignored),
    )


def is_source(path: Path) -> bool:
    """Return whether a path names an existing small source or configuration."""
    return _kind(path.name) is not None and _is_small(path)


def is_configuration(name: str) -> bool:
    """Return whether a file has the suffix of a configuration."""
    return _kind(name) is _CONFIGURATIONS


def _kind(name: str) -> frozenset[str] | None:
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - there are thousands of names
    return next((kind for kind in (_SOURCES, _CONFIGURATIONS) if suffix in kind), None)


def _is_small(path: Path | os.DirEntry[str]) -> bool:
    """Return whether a path is a small regular file that this user can read, and not a link."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False  # gone
    is_file = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_SOURCE_BYTES
    return is_file and os.access(path, os.R_OK)


def _is_copied(path: Path) -> bool:
    """Return whether a tracked path is a link, or a readable file that is not too large. A submodule is a directory."""
    try:
        status = path.lstat()
    except OSError:
        return False  # deleted or moved, but git still tracks it
    is_file = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_TRACKED_BYTES
    return stat.S_ISLNK(status.st_mode) or (is_file and os.access(path, os.R_OK))


def _small_files(
    root: Path, directories: Iterable[str], is_left_out: Callable[[os.DirEntry[str]], bool]
) -> frozenset[str]:
    """Return the small sources and configurations in and below directories.

    If there are too many, the directories are not those of one project but, for example, a home directory: return only
    what lies in the directories themselves.
    """
    found, entries, size = list[tuple[int, str]](), 0, 0
    for level, seen, files in _levels(root, directories, is_left_out):
        entries += seen
        found += [(level, name) for name, _ in files]
        size += sum(file_size for _, file_size in files)
        if entries > _MOST_ENTRIES or len(found) > _MOST_FILES or size > _MOST_BYTES:
            return frozenset(name for level, name in found if level == 0)
    return frozenset(name for _, name in found)


def _levels(
    root: Path, directories: Iterable[str], is_left_out: Callable[[os.DirEntry[str]], bool]
) -> Iterator[tuple[int, int, list[tuple[str, int]]]]:
    """Yield, for each directory, upper ones first: its level, its number of entries, and its files with their sizes.

    A configuration counts only beside a source, at the top, or below a directory that is named after configurations:
    elsewhere, a JSON or YAML file is a result.
    """
    waiting = deque((directory.rstrip("/"), 0, directory == "") for directory in directories)
    while waiting:
        directory, level, has_configurations = waiting.popleft()
        try:
            with os.scandir(root / directory) as listing:
                entries = list(islice(listing, _MOST_IN_DIRECTORY + 1))
        except OSError:
            continue  # this user cannot read it, so the run gets a link
        number = len(entries)
        if number > _MOST_IN_DIRECTORY and directory:
            continue
        entries = [entry for entry in entries if not entry.name.startswith(".") and not is_left_out(entry)]
        name = os.path.basename(directory)  # noqa: PTH119 - there are thousands of names
        is_conf = has_configurations or name.lower().startswith(_OF_CONFIGURATIONS)
        takes_all = is_conf or any(_kind(entry.name) is _SOURCES for entry in entries)
        files = list[tuple[str, int]]()
        for entry in entries:
            path = os.path.join(directory, entry.name)  # noqa: PTH118 - as above
            if entry.is_dir(follow_symlinks=False):
                if level < _MOST_LEVELS:
                    waiting.append((path, level + 1, is_conf and directory != ""))
            elif (kind := _kind(entry.name)) and (takes_all or kind is _SOURCES) and _is_small(entry):
                files.append((path, entry.stat().st_size))
        yield level, number, files
