"""Makes a run's `code/`: copies of the user's code, links to everything else, and our packages. Login node.

An edit of the user's code, or an upgrade of ours, does not change a run that waits or resumes.
"""

import marshal
import os
import shutil
import stat
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType
from zipfile import ZipFile, ZipInfo

from hpc.base.files import sha256_of
from hpc.base.kernel import sync_file_system
from hpc.run.code_files import CodeFiles, stamp
from hpc.run.own_packages import DIRECTORIES
from hpc.run.rundir import LIBRARY, RunDir
from hpc.submissions.user_code.code_layout import is_source
from hpc.submissions.user_code.own_code import UserCode

_UNCHECKED = 1  # Python uses this byte code whatever times and content the source has (PEP 552)


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


def copy_packages(run: RunDir) -> None:
    """Write our packages into the archive of a run directory, and its checksum beside it.

    Python cannot add byte code to an archive, so it is copied, too: else each process would compile the modules again.
    """
    run.packages.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(run.packages, "w") as archive:
        for file, name in _files():
            archive.writestr(ZipInfo(name), file.read_bytes())
            if name.endswith(".py") and (code := _byte_code(file, f"{run.packages.name}/{name}")):
                archive.writestr(ZipInfo(f"{name}c"), code)
    run.package_checksums.write_text(_checksum_line(run))


def _files() -> Iterator[tuple[Path, str]]:
    """Yield the files of our packages, with their names in the archive."""
    for source in DIRECTORIES:
        place = Path(LIBRARY if source.name == "torchrelay" else "", source.name)
        for directory, below, names in os.walk(source):
            parent = place / Path(directory).relative_to(source)
            below[:] = [name for name in below if name != "__pycache__" and parent / name != Path(LIBRARY)]
            yield from ((Path(directory, name), str(parent / name)) for name in names)


def has_damaged_packages(run: RunDir) -> bool:
    """Return whether the archive with our packages in a run is missing, or not as it was written."""
    if not run.package_checksums.exists():
        return False
    try:
        return run.package_checksums.read_text() != _checksum_line(run)
    except FileNotFoundError:
        return True


def _checksum_line(run: RunDir) -> str:
    return f"{sha256_of(run.packages)}  {run.packages.name}\n"


def _byte_code(source: Path, name: str) -> bytes | None:
    """Return a module's byte code, whose tracebacks name the module by `name`; None if it would be compiled in vain.

    Python's loader compiles a module whose byte code is missing, and keeps the result for the next run.
    """
    if sys.dont_write_bytecode and not Path(cache_from_source(source)).exists():
        return None
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    header = struct.pack("<4sI", MAGIC_NUMBER, _UNCHECKED) + source_hash(source.read_bytes())
    return header + marshal.dumps(_renamed(code, name)) if code else None


def _renamed(code: CodeType, name: str) -> CodeType:
    """Return code with another file name: Python would show the lines of the installed file, which may have changed."""
    constants = tuple(_renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)
