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
    for name in code.layout.links:
        (target / name).symlink_to(code.root / name)
    # Links come last, because where they lead depends on what is there.
    for name in sorted(code.layout.copies, key=lambda name: (code.root / name).is_symlink()):
        _copy(code.root, name, target)
    copied = {name: stamp(target / name) for name in code.layout.copies if os.path.lexists(target / name)}
    top = os.path.relpath(code.top, code.root)
    CodeFiles(root=str(code.root), top=top, copied=copied, linked=code.layout.links).save(target)


def _make_directory(path: Path) -> None:
    path.mkdir()
    _close_to_others(path)


def _copy(root: Path, name: str, code: Path) -> None:
    """Copy a file. A link leads to its place in `code/`, or else to the original; a source outside is copied."""
    source, target = root / name, code / name
    if not source.is_symlink():
        try:
            shutil.copy2(source, target)
        except FileNotFoundError:
            return  # the user has just removed it
        _close_to_others(target)
        return
    text = os.readlink(source)  # noqa: PTH115 - a Path would drop a final slash
    inner = os.path.relpath(text, source.parent) if text.startswith("/") else text
    target.symlink_to(inner)
    way = os.path.normpath(os.path.join(os.path.dirname(name), inner))  # noqa: PTH118, PTH120 - purely of words
    if way.split("/")[0] != ".." and (target.exists() or not source.exists()):
        return
    target.unlink()
    if is_source(Path(os.path.realpath(source))):  # unlike Path.resolve, this raises no error for a loop
        shutil.copy2(source, target)
        _close_to_others(target)
    else:
        target.symlink_to(source)


def _close_to_others(path: Path) -> None:
    """Take the right to write from others, because a group's members could run their own code as this user."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
