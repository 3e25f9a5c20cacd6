"""Replaces a run's `code/` by the user's present code, and keeps what the run has written there. Login node.

The new `code/` is made whole under another name, with hard links to the files of the run, and then takes the place of
the old one. A kill leaves one of them, and no file of the run is lost.
"""

import dataclasses
import filecmp
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.files import link_file, remove_directory
from hpc.base.git import repository
from hpc.run.code_files import CodeFiles, written_files
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.submissions.user_code.code_copy import copy_code
from hpc.submissions.user_code.own_code import KeptFiles, UserCode, find_code


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
