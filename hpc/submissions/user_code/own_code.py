"""Finds the user's code for a run, and decides what the run gets of its directory. Runs on the login node.

A script must find in its working directory what it would find there under torchrun. So `code/` is an image of a
directory of the user, the root: with copies of the files that an edit must not change, and links to everything else.
The root is the top of the repository, or else the working directory; or a directory above it, if the script's text
or its arguments name something there, such as `../data`.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from hpc.base import git
from hpc.base.errors import UserError
from hpc.run.code_files import parents, stamp
from hpc.run.spec_file import Program, script_program
from hpc.submissions.user_code.code_layout import (
    CodeLayout,
    CodeSources,
    exclusion,
    find_sources,
    is_configuration,
    is_source,
    lay_out,
    scan,
)
from hpc.submissions.user_code.script_imports import NO_TEXT, ScriptText, module_directories, module_file, read_script

# How far the root may be above the repository or the working directory, and how many entries a directory between them
# may have: each becomes a link.
_MOST_LEVELS, _MOST_ENTRIES = 3, 1000
_UPWARD = re.compile(rb"(?<![\w./])\.\./[\w./-]*")
# The configurations that are searched for such names.
_MOST_FILES_READ, _MOST_BYTES_READ = 200, 2**16


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The user's code for a run, and what the run's `code/` has of it."""

    root: Path
    """The directory of which `code/` is the image."""
    top: Path
    """The top of the repository; the working directory if the code is in no repository."""
    working_directory: str = "."
    """The directory, relative to `root`, in which the script starts."""
    script: tuple[str, ...] = ()
    """The script's path relative to the working directory, or `-m` and the module; then the arguments. Empty for our
    trainer."""
    in_place: bool = False
    """Whether the script runs where it is, instead of from a copy."""
    layout: CodeLayout = field(default_factory=CodeLayout)
    """What is copied and linked: nothing for the classifier, which needs no file of the user's directory."""
    text: ScriptText = NO_TEXT
    """The script and the modules that it imports."""
    tracked: frozenset[str] = frozenset()
    """The files that git tracks, relative to `root`."""
    written: frozenset[str] = frozenset()
    """What the run has written and its new code keeps, relative to `code/`."""
    git_problem: str | None = None
    """Why git did not say which files it tracks; None if it did, or if there is no repository."""
    copied_from: Path | None = None
    """A directory that has been made for this layout, which the run copies; None if `code/` is made from `root`."""
    copied_revision: str | None = None
    """The revision of the code in `copied_from`."""

    @property
    def revision(self) -> str | None:
        """The git revision, with `+dirty` if a tracked file is changed, or the script or one of its modules untracked.

        None outside of a repository. Runs git.
        """
        revision = self.copied_revision or git.git_revision(self.top)
        own = {os.path.relpath(path, self.root) for path in self.text.files}
        has_untracked = not own <= self.tracked
        return f"{revision.removesuffix('+dirty')}+dirty" if revision and has_untracked else revision

    @property
    def program(self) -> Program:
        """The program of the script, whose modules are found from the top of the repository."""
        return script_program(self.script, os.path.relpath(self.top, self.root))


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """What a run has written, for which its new code leaves room."""

    written: Collection[str]
    """The paths relative to `code/`, as `written_files` yields them."""
    copied: Mapping[str, tuple[int, int]]
    """The files that the old code had copied, as in `CodeFiles`."""
    levels: int = 0
    """How far the root of the old code is above its top. The new code has the same, so that paths stay."""

    def settle(self, names: Collection[str], tracked: Collection[str], root: Path) -> tuple[set[str], set[str]]:
        """Return the files of the new code, and what the run has written, without those that give way to the others.

        Where both have something, the new code's is taken if git tracks it, or if the user has changed it since it was
        copied; else the run's.
        """
        of_run, above = frozenset(self.written), parents(self.written)
        disputed = {name for name in names if name in of_run or name in above or parents([name]) & of_run}
        lost = {
            name for name in disputed
            if (stamp(root / name) == self.copied[name] if name in self.copied else name not in tracked)
        }  # fmt: skip
        new = set(names) - lost
        in_new, won = parents(new), disputed - lost
        return new, {name for name in of_run if name not in new and name not in in_new and not parents([name]) & won}


def find_code(
    working_directory: Path,
    script: tuple[str, ...],
    runs_dir: Path = Path("runs"),
    *,
    elsewhere: bool = False,
    in_place: bool = False,
    kept: KeptFiles | None = None,
) -> UserCode:
    """Return the user's code, and what a run copies and links.

    `script` is the user's script, or `-m` and a module, and its arguments; it is empty for the classifier. A script
    that runs `elsewhere` has an environment whose modules this process cannot see. One that runs `in_place` is not
    copied. A run that gets new code has `kept` what it has written.

    Raises:
        UserError: the module is missing, the script is too far away, or its directory has too many entries.
    """
    here = working_directory.resolve()
    top = git.repository(here) or here
    if not script:
        return UserCode(root=top, top=top)
    script, file, text = _read(here, top, script, elsewhere=elsewhere)
    if in_place:
        place = os.path.relpath(here, top)
        return UserCode(root=top, top=top, working_directory=place, script=script, text=text, in_place=True)
    runs_dir = (here / runs_dir).resolve()
    is_left_out = exclusion(runs_dir)
    sources = find_sources(top, is_left_out)
    references = {*text.references, *_named_in_arguments(here, script), *_named_in_files(here, top, sources)}
    own = {place for path in text.files for place in _places(path)}
    started = set(_places(file)) if file else set[Path]()
    root = (top, *top.parents)[kept.levels] if kept else _root(top, {*references, *own})
    if file and not all(place.is_relative_to(root) for place in started):
        raise UserError(
            f"{script[0]} is not below {root}, so it would be missing in the run's copy of the code: move it there, or "
            "--in-place to run it where it is"
        )
    below = os.path.relpath(top, root)
    tracked, small = (
        {os.path.normpath(f"{below}/{name}") for name in names} for names in (sources.tracked, sources.small)
    )
    own.update(path for path in references if not path.is_relative_to(top) and is_source(path))
    names, written = {*tracked, *small, *_relative(own, root)}, set[str]()
    if kept:
        names, written = kept.settle(names, tracked, root)
    made = _relative([here, *(place.parent for place in started)], root) - {"."}
    # The directory of the runs needs no link, and none of the directories above it may be one.
    layout = lay_out(root, names, is_left_out, made=made, written=written | (_relative([runs_dir], root) - {"."}))
    return UserCode(
        root=root, top=top, working_directory=os.path.relpath(here, root), script=script, layout=layout, text=text,
        tracked=frozenset(tracked), written=frozenset(written), git_problem=sources.problem,
    )  # fmt: skip


def _read(
    here: Path, top: Path, script: tuple[str, ...], *, elsewhere: bool
) -> tuple[tuple[str, ...], Path | None, ScriptText]:
    """Return `script` for a UserCode, the script's file (None for an installed module), and the text."""
    if script[0] != "-m":
        # A script may be a link: its own path is that of the link, but Python's is that of the file to which it leads.
        path = Path(os.path.normpath(here / script[0]))
        text = read_script(path, here, [path.resolve().parent, top])
        return (os.path.relpath(path, here), *script[1:]), path, text
    name, places = script[1], module_directories(here, top)
    file = module_file(name, places)
    if file is None and not elsewhere and find_spec(name.partition(".")[0]) is None:
        raise UserError(
            f"module {name!r} is neither below {' or '.join(map(str, places))} nor installed: give its name from "
            "there, or the path of a script"
        )
    return script, file, read_script(file, here, places) if file else NO_TEXT


# --- the root ---


def _root(top: Path, references: Iterable[Path]) -> Path:
    """Return `top`, or a directory above it if the references need it and it may be the root."""
    root = top
    for path in sorted(references):
        higher = Path(os.path.commonpath([root, path]))
        between = top.parents[: len(top.parts) - len(higher.parts)]
        if len(between) <= _MOST_LEVELS and all(map(_may_be_root, between)):
            root = higher
    return root


def _may_be_root(directory: Path) -> bool:
    """Return whether a run may have an image of a directory: it is not too large, and not the system's."""
    if directory == directory.parent or directory in Path.home().parents or not os.access(directory, os.R_OK):
        return False
    return len(scan(directory, _MOST_ENTRIES)) <= _MOST_ENTRIES


def _named_in_arguments(here: Path, script: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths above the working directory that the script's arguments name, such as `--data=../data`."""
    for word in script[1:]:
        value = word.rpartition("=")[2]
        if value == ".." or value.startswith("../"):
            yield Path(os.path.normpath(here / value))


def _named_in_files(here: Path, top: Path, sources: CodeSources) -> Iterator[Path]:
    """Yield the existing paths outside of `top` that configurations name with `..`."""
    for name in islice(filter(is_configuration, sorted(sources.tracked | sources.small)), _MOST_FILES_READ):
        with suppress(OSError), (top / name).open("rb") as file:
            for text in set(_UPWARD.findall(file.read(_MOST_BYTES_READ))):
                for base in (here, (top / name).parent):
                    path = Path(os.path.normpath(base / os.fsdecode(text)))
                    if not path.is_relative_to(top) and path.exists():
                        yield path


def _places(path: Path) -> Iterator[Path]:
    """Yield the links on the way to an existing file, and the file itself, each by a path without links above it."""
    while path.exists():
        link = next((each for each in (*reversed(path.parents), path) if each.is_symlink()), None)
        if link is None:
            break
        yield link
        path = Path(os.path.normpath(link.parent / link.readlink() / path.relative_to(link)))
    yield path


def _relative(paths: Iterable[Path], root: Path) -> set[str]:
    """Return the paths below `root`, relative to it."""
    return {str(path.relative_to(root)) for path in paths if path.is_relative_to(root)}
