"""Makes a run's `code/`: copies of the user's code, links to everything else, and our packages. Login node.

An edit of the user's code, or an upgrade of ours, does not change a run that waits or resumes.
"""

import dataclasses
import filecmp
import marshal
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from itertools import count
from pathlib import Path
from types import CodeType
from zipfile import ZipFile, ZipInfo

from hpc.base.errors import UserError
from hpc.base.files import link_file, remove_directory, sha256_of
from hpc.base.git import repository
from hpc.base.kernel import sync_file_system
from hpc.run.code_files import CodeFiles, stamp, written_files
from hpc.run.own_packages import directories
from hpc.run.rundir import LIBRARY, RunDir
from hpc.run.spec import RunSpec
from hpc.submissions.user_code.code_layout import is_source
from hpc.submissions.user_code.own_code import KeptFiles, UserCode, find_code

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
    for source in directories():
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


# --- new code for a run (hpc resume --new-code) ---

# The new `code/` is made whole under another name, with hard links to the files of the run, and then takes the place of
# the old one. A kill leaves one of them, and no file of the run is lost.


@dataclass(frozen=True, kw_only=True)
class NewCode:
    """New code for a run, which the run does not use yet."""

    run: RunDir
    """A temporary directory with the new `code/`."""
    code: UserCode
    replaced: tuple[str, ...]
    """Files that the run has written and that give way to files of the new code, relative to the old `code/`."""


def prepare_code(run: RunDir, spec: RunSpec, cleanup: ExitStack) -> NewCode:
    """Make the new code from the current directory, in a temporary directory, which `cleanup` removes.

    Raises:
        UserError: the run's working directory or script is not in the repository.
    """
    record = CodeFiles.load(run.code)
    code = _find(run, spec, record)
    temporary = RunDir(Path(tempfile.mkdtemp(dir=run.path, prefix=".resume-", suffix=".tmp")))
    cleanup.callback(shutil.rmtree, temporary.path, ignore_errors=True)
    copy_code(temporary, code)
    if record and (made := CodeFiles.load(temporary.code)):
        # Of a file that the run has changed and keeps, the next renewal must know whether the user has changed it, too.
        changed = {name: record.copied[name] for name in code.written & record.copied.keys()}
        dataclasses.replace(made, copied={**made.copied, **changed}).save(temporary.code)
    replaced = []
    for name in sorted(written_files(run.code, record)):
        if name in code.written:
            _link(run.code / name, temporary.code / name)
        elif not _is_same(run.code / name, temporary.code / name):
            replaced.append(name)
            _link(run.code / name, temporary.replaced_files(0) / name)
    return NewCode(run=temporary, code=code, replaced=tuple(replaced))


def _find(run: RunDir, spec: RunSpec, record: CodeFiles | None) -> UserCode:
    """Return the code of the current directory, with room for what the run has written."""
    top = repository(Path.cwd()) or Path.cwd()
    old_top = Path(record.top) if record else Path()
    place = top / os.path.relpath(spec.working_directory, old_top)
    if not place.is_dir() or (old_top.parts and old_top.parts[-1] != top.name):
        wanted = Path(record.root, spec.working_directory) if record else place
        raise UserError(f"--new-code: run {run.name} starts in {wanted}: type hpc resume there, or in its repository")
    written = frozenset(written_files(run.code, record))
    # Without a record, all that is in `code/` may be a copy, so the new code takes its place.
    copied = record.copied if record else dict.fromkeys(written, (-1, -1))
    kept = KeptFiles(written=written, copied=copied, levels=len(old_top.parts))
    return find_code(place, spec.script, run.path.parent, elsewhere=bool(spec.python or spec.container), kept=kept)


def _link(source: Path, target: Path) -> None:
    """Give a file of the run a second name. A directory, whose path ends with a slash, is empty and is made new."""
    if source.is_dir() and not source.is_symlink():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    link_file(source, target)


def _is_same(old: Path, new: Path) -> bool:
    """Return whether nothing is lost if `new` replaces `old`."""
    if old.is_symlink() or not old.is_file():
        return old.is_symlink() and new.is_symlink() and old.readlink() == new.readlink()
    return new.is_file() and filecmp.cmp(old, new, shallow=False)


def replace_code(run: RunDir, new: NewCode, resumption: int, undo: ExitStack) -> Path | None:
    """Put the new code into the place of the old. Until the job is queued, the old one stays, for `undo` to restore.

    Returns the directory of the run's files that gave way to the new code; None if there are none.
    """
    if run.previous_code.exists():
        remove_directory(run.previous_code)  # a killed resumption had already replaced it
    kept = None
    if new.replaced:
        # A killed resumption may have left a directory of this name.
        kept = next(path for path in map(run.replaced_files, count(resumption)) if not path.exists())
        new.run.replaced_files(0).rename(kept)
        undo.callback(shutil.rmtree, kept)
    run.code.rename(run.previous_code)
    undo.callback(run.previous_code.rename, run.code)
    new.run.code.rename(run.code)
    undo.callback(run.code.rename, new.run.code)
    return kept


def restore_code(run: RunDir) -> None:
    """Restore the old code if a resumption was killed before the new code took its place."""
    if run.previous_code.exists() and not run.code.exists():
        run.previous_code.rename(run.code)
