"""Makes a run's `code/`: copies of the user's code, links to everything else, and our packages. Login node.

An edit of the user's code, or an upgrade of ours, does not change a run that waits or resumes.
"""

import os
import shutil
import stat
from pathlib import Path

from hpc.base.kernel import sync_file_system
from hpc.run.code_files import CodeFiles, stamp
from hpc.run.rundir import RunDir
from hpc.submissions.user_code.code_sources import is_source
from hpc.submissions.user_code.own_code import UserCode
from hpc.submissions.user_code.package_copy import copy_packages


def copy_code(run: RunDir, code: UserCode) -> None:
    """Create the run's `code/` and the file with the revision of the code."""
    copy_files(code, run.code)
    copy_packages(run)
    if revision := code.revision:
        run.revision.write_text(f"{revision}\n")
    sync_file_system(run.code)  # without this, storage that fails now may leave all these files empty


def copy_files(code: UserCode, target: Path) -> None:
    """Make a new directory of the user's files, as `code.layout` says, and record what it has."""
    if code.copied_from:
        shutil.copytree(code.copied_from, target, symlinks=True)
        return
    _make_directory(target)
    if not code.layout.directories and not code.layout.copies and not code.layout.links:
        return
    for name in code.layout.directories:
        _make_directory(target / name)
    for name in code.layout.links:
        (target / name).symlink_to(code.root / name)
    inner = {name: text for name in code.layout.copies if (text := _link_within(code.root, name)) is not None}
    for name, text in inner.items():
        (target / name).symlink_to(text)
    for name in code.layout.copies:
        if name not in inner:
            _copy(code.root / name, target / name)
    for name in inner:
        if (code.root / name).exists() and not (target / name).exists():  # it leads to what no run has
            (target / name).unlink()
            _copy(code.root / name, target / name)
    copied = {name: stamp(target / name) for name in code.layout.copies if os.path.lexists(target / name)}
    top = os.path.relpath(code.top, code.root)
    CodeFiles(root=str(code.root), top=top, copied=copied, linked=code.layout.links).save(target)


def _make_directory(path: Path) -> None:
    path.mkdir()
    _close_to_others(path)


def _copy(source: Path, target: Path) -> None:
    """Copy a file. Of a link, copy the source to which it leads; if it leads to anything else, make a link to it."""
    # Unlike Path.resolve, os.path.realpath raises no error for a loop.
    if source.is_symlink() and not is_source(Path(os.path.realpath(source))):
        target.symlink_to(source)
        return
    try:
        shutil.copy2(source, target)
    except (FileNotFoundError, IsADirectoryError):
        return  # the user has just removed or replaced it
    _close_to_others(target)


def _link_within(root: Path, name: str) -> str | None:
    """Return the text for a copy of a link that leads to a place below `root`; None for other links, and for files."""
    try:
        parent, text = (root / name).parent, os.readlink(root / name)  # noqa: PTH115 - a Path would drop a final slash
    except OSError:
        return None
    text = os.path.relpath(text, parent) if text.startswith("/") else text
    place = os.path.relpath(os.path.normpath(parent / text), root)
    return None if place.split("/")[0] == ".." else text


def _close_to_others(path: Path) -> None:
    """Take the right to write from others, because a group's members could run their own code as this user."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
