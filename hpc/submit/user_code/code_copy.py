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
from hpc.submit.user_code.code_sources import is_source
from hpc.submit.user_code.own_code import UserCode
from hpc.submit.user_code.package_copy import copy_packages


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
    for name in code.layout.copies:
        _copy(code.root, name, target / name)
    for name in code.layout.links:
        (target / name).symlink_to(code.root / name)
    copied = {name: stamp(target / name) for name in code.layout.copies if os.path.lexists(target / name)}
    top = os.path.relpath(code.top, code.root)
    CodeFiles(root=str(code.root), top=top, copied=copied, linked=code.layout.links).save(target)


def _make_directory(path: Path) -> None:
    path.mkdir()
    _close_to_others(path)


def _copy(root: Path, name: str, target: Path) -> None:
    """Copy a file, or a link that leads to a place within the root. Any other link leads to the original."""
    source = root / name
    if not source.is_symlink():
        try:
            shutil.copy2(source, target)
        except FileNotFoundError:
            return  # the user has just removed it
        _close_to_others(target)
    elif not _leads_outside(name, text := str(source.readlink())):
        target.symlink_to(text)
    elif is_source(source.resolve()):
        shutil.copy2(source, target)
        _close_to_others(target)
    else:
        target.symlink_to(source)


def _leads_outside(name: str, text: str) -> bool:
    """Return whether the link `name`, whose text is a path, leads out of the directory to which `name` is relative."""
    path = os.path.normpath(os.path.join(os.path.dirname(name), text))  # noqa: PTH118, PTH120 - purely of words
    return path.startswith(("/", "../")) or path == ".."


def _close_to_others(path: Path) -> None:
    """Take the right to write from others, because a group's members could run their own code as this user."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
