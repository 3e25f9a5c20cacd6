"""Decides what a run's `code/` consists of: copies of some files, and links to all else. Reads directories alone.

`code/` has what the user's directory has, so that every relative path works. A directory in which nothing is copied
is a single link, however much it holds. A directory in which something is copied is made new, with a link for each of
its other entries.
"""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import UserError
from hpc.run.code_files import OUR_DIRECTORY, parents
from hpc.run.rundir import RunDir
from hpc.submissions.user_code.code_sources import scan

# What is in no `code/`: the records of version control, caches of tools, and our own packages.
_LEFT_OUT = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".tox",
    ".nox", OUR_DIRECTORY,
})  # fmt: skip
# A directory with more entries becomes a link, although some of its files would be copied: links would take minutes.
_MOST_LINKS = 50_000
# What git tracks in a directory of data or results, to keep the directory or to describe it.
_PLACEHOLDERS = (".gitkeep", ".keep", ".gitignore", ".gitattributes", "README", "README.md", "README.txt", "README.rst")


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

    Args:
        root: the directory.
        copies: the files to copy.
        is_left_out: says which entries no run sees.
        made: directories that must not become links, such as the one in which the script starts.
        written: what the run has written; the layout leaves room for it.

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
