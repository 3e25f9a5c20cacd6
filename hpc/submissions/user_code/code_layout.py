"""Decides what a run's `code/` consists of: copies of some files, and links to all else. Reads directories alone.

`code/` has what the user's directory has, so that every relative path works. A directory in which nothing is copied
is a single link, however much it holds. A directory in which something is copied is made new, with a link for each of
its other entries.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc.base import git
from hpc.base.errors import TorchrelayError, UserError
from hpc.run.code_files import OUR_DIRECTORY, parents
from hpc.run.rundir import RunDir

# What is in no `code/`: the records of version control, caches of tools, and our own packages.
_LEFT_OUT = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".tox",
    ".nox", OUR_DIRECTORY,
})  # fmt: skip
# A directory with more entries becomes a link, although some of its files would be copied: links would take minutes.
_MOST_LINKS = 50_000
# What git tracks in a directory of data or results, to keep the directory or to describe it.
_PLACEHOLDERS = (".gitkeep", ".keep", ".gitignore", ".gitattributes", "README", "README.md", "README.txt", "README.rst")
_SOURCES = frozenset({".py", ".pyx", ".pxd", ".sh", ".bash", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh"})
_CONFIGURATIONS = frozenset({".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".conf", ".gin"})
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
            is_conf = has_configurations or Path(directory).name.lower().startswith(("conf", "cfg"))
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


@dataclass(frozen=True, kw_only=True)
class CodeLayout:
    """The content of a run's `code/`, by paths relative to it."""

    copies: tuple[str, ...] = ()
    """Files, and links that git tracks."""
    links: tuple[str, ...] = ()
    """Files and directories that are links to the originals."""
    directories: tuple[str, ...] = ()
    """Directories to make, each after its parent."""
    crowded: tuple[str, ...] = ()
    """Directories that are links, although they have files to copy, because they have too many entries."""


def exclusion(runs_dir: Path) -> Callable[[os.DirEntry[str]], bool]:
    """Return a function that says whether no run sees an entry: tools' files, Python environments, and runs."""

    def is_left_out(entry: os.DirEntry[str]) -> bool:
        if entry.name in _LEFT_OUT:
            return True
        path = Path(entry.path)
        try:
            if not entry.is_dir():
                return False
            is_environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
            return is_environment or path == runs_dir or (RunDir(path).spec.exists() and RunDir(path).events.is_dir())
        except OSError:
            return False  # a link that leads to itself, or a directory that this user cannot read

    return is_left_out


def lay_out(
    root: Path,
    copies: Collection[str],
    is_left_out: Callable[[os.DirEntry[str]], bool],
    *,
    made: Iterable[str] = (),
    written: Collection[str] = (),
) -> CodeLayout:
    """Return the layout for a directory of the user.

    No run sees what `is_left_out`. Directories in `made` do not become links: the script starts in one of them, for
    example. The layout leaves room for what the run has `written`.

    Raises:
        UserError: a directory in `made` has so many entries that links to them would take minutes.
    """
    held = {*copies, *written}
    fixed = {"", *made, *parents(made), *parents(written)}
    with_content = {*fixed, *parents(name for name in held if not name.endswith(_PLACEHOLDERS))}
    opened = {*fixed, *parents(held)}
    links, crowded, directories, whole = list[str](), list[str](), list[str](), list[str]()
    for directory in sorted(opened):
        if f"{directory}/".startswith(tuple(whole)):
            continue
        # os.walk and Path.rglob would not enter the links in such a directory. They enter a link that they are given.
        is_whole = directory not in with_content and _has_content(root / directory)
        entries = [] if is_whole else scan(root / directory, _MOST_LINKS)
        if len(entries) > _MOST_LINKS and directory in fixed:
            raise UserError(
                f"{root / directory} has more than {_MOST_LINKS:,} entries, and the run would need a link to each: "
                "move the data into a directory below it, or submit with --in-place"
            )
        if is_whole or len(entries) > _MOST_LINKS:
            whole.append(f"{directory}/")
            links.append(directory)
            crowded += [] if is_whole else [directory]
            continue
        directories.append(directory)
        for entry in entries:
            name = os.path.join(directory, entry.name)  # noqa: PTH118 - there are thousands of names
            if name not in opened and name not in held and not is_left_out(entry):
                links.append(name)
    return CodeLayout(
        copies=tuple(sorted(name for name in copies if not name.startswith(tuple(whole)))), links=tuple(sorted(links)),
        directories=tuple(directory for directory in directories if directory), crowded=tuple(crowded),
    )  # fmt: skip


def _has_content(directory: Path) -> bool:
    """Return whether anything below a directory is not a placeholder."""
    return any(not name.endswith(_PLACEHOLDERS) for _, _, names in os.walk(directory) for name in names)
