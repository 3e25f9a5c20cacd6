"""Copies the code that a run executes, at submission. Runs on the login node.

`code/` has the tracked files of the user's repository with all changes, the script and the files of the repository that
it imports (tracked or not), the files of --include and, in `.torchrelay/`, our three packages. So neither an edit nor
an upgrade changes a run that waits or resumes.

Our packages are copied as plain files. From a zip they would load as fast, but before 3.13 Python prints tracebacks
without the source lines of a zip.
"""

import glob
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec, source_hash
from pathlib import Path
from typing import Protocol

from hpc.base import git
from hpc.base.errors import UserError
from hpc.base.files import sha256_of
from hpc.base.kernel import sync_file_system
from hpc.run.rundir import RunDir
from hpc.submit.script_imports import imported_files, module_directories, module_file

_PACKAGES = ("hpc", "jobs", "training")


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The user's code for a run, and the part of it to copy."""

    root: Path
    """The top of the repository; the working directory if the code is in no repository."""
    names: tuple[str, ...]
    """The files to copy, by their paths relative to `root`."""
    working_directory: str = "."
    """The directory, relative to `root`, in which the script starts."""
    script: tuple[str, ...] = ()
    """The script's path relative to the working directory, or `-m` and the module; then the arguments. Empty for our
    trainer."""
    in_place: bool = False
    """Whether the script runs where it is, instead of from a copy."""
    has_untracked: bool = False
    """Whether git does not track some of the files to copy."""
    copied_revision: str | None = None
    """The git revision of the code if `root` is a copy of a repository; None if it is not."""

    @property
    def revision(self) -> str | None:
        """The git revision, with `+dirty` if a file is changed or untracked; None outside of a repository. Runs git."""
        revision = self.copied_revision or git.git_revision(self.root)
        return f"{revision.removesuffix('+dirty')}+dirty" if revision and self.has_untracked else revision


def find_code(
    working_directory: Path,
    script: tuple[str, ...],
    include: Sequence[str] = (),
    runs_dir: Path = Path("runs"),
    *,
    elsewhere: bool = False,
) -> UserCode:
    """Return the user's code: the repository's tracked files, the files of `include`, the script, and what it imports.

    Args:
        working_directory: the directory to which the script's path and the patterns are relative.
        script: the user's script, or `-m` and a module, and its arguments; empty for our trainer.
        include: patterns of untracked files to copy.
        runs_dir: the directory of the runs, which is not code.
        elsewhere: whether a module may be installed in an environment that this process cannot see.

    Raises:
        UserError: a pattern matches nothing, the module is missing, or a file is outside of the repository.
    """
    here, root = working_directory.resolve(), _root(working_directory)
    no_code = (root / ".git", (here / runs_dir).resolve())
    added = [name for pattern in include for name in _matches(here, root, pattern, no_code)]
    tracked = set(git.tracked_files(root) if git.repository(here) else ())
    names, place = {*tracked, *added}, "."
    if script:
        place, script, file = _find_script(here, root, script, elsewhere=elsewhere)
        names |= _own_files(file, root, here, script, place) if file else set()
    return UserCode(
        root=root, names=tuple(sorted(names)), working_directory=place, script=script,
        has_untracked=not names <= tracked,
    )  # fmt: skip


def _find_script(
    here: Path, root: Path, script: tuple[str, ...], *, elsewhere: bool
) -> tuple[str, tuple[str, ...], Path | None]:
    """Return `working_directory` and `script` for a UserCode, and the script's file (None for an installed module)."""
    place = os.path.relpath(here, root)
    if script[0] == "-m":
        return place, script, _find_module(root, place, script[1], elsewhere=elsewhere)
    file = (here / script[0]).resolve()
    return place, (os.path.relpath(file, here), *script[1:]), file


def _own_files(file: Path, root: Path, here: Path, script: tuple[str, ...], place: str) -> set[str]:
    """Return `file` and the files that it imports, relative to the root. Raises UserError if `file` is outside."""
    if not file.is_relative_to(root):
        raise UserError(
            f"{os.path.relpath(file, here)} is not below {root}, so it would be missing in the run's copy of the code: "
            "move it there, or --in-place to run it where it is"
        )
    search = module_directories(root, place) if script[0] == "-m" else [file.parent, root]
    return {str(path.relative_to(root)) for path in {file, *imported_files(file, search)} if path.is_relative_to(root)}


def code_in_place(working_directory: Path, script: tuple[str, ...], *, elsewhere: bool = False) -> UserCode:
    """Return the code of a script that runs in place and is not copied.

    Raises UserError if the script is a module that is not found. `elsewhere` is as in `find_code`.
    """
    here, root = working_directory.resolve(), _root(working_directory)
    place, script, _ = _find_script(here, root, script, elsewhere=elsewhere)
    return UserCode(root=root, names=(), working_directory=place, script=script, in_place=True)


class _Environments(Protocol):
    @property
    def python(self) -> object: ...

    @property
    def container(self) -> object: ...


def own_environment(run: _Environments) -> bool:
    """Return whether a script runs in a Python environment of its own, whose modules this process cannot see."""
    return bool(run.python or run.container)


def _find_module(root: Path, working_directory: str, name: str, *, elsewhere: bool) -> Path | None:
    """Return a module's file in the repository; None if the module is, or may be, installed. Else raises UserError."""
    places = module_directories(root, working_directory)
    found = module_file(name, places)
    if found is None and not elsewhere and find_spec(name.partition(".")[0]) is None:
        where = " or ".join(map(str, places))
        raise UserError(
            f"module {name!r} is neither below {where} nor installed: give its name from there, or the path of a script"
        )
    return found


def _root(working_directory: Path) -> Path:
    return (git.repository(working_directory) or working_directory).resolve()


def _matches(here: Path, root: Path, pattern: str, no_code: Sequence[Path]) -> list[str]:
    """Return the paths, relative to `root`, of files that match `pattern` or lie below a matching directory."""
    found = [(here / name).resolve() for name in glob.glob(pattern, root_dir=here, recursive=True)]  # noqa: PTH207 - pathlib refuses absolute patterns
    files = [path for match in found for path in (match.rglob("*") if match.is_dir() else [match]) if path.is_file()]
    files = [path for path in files if not any(path.is_relative_to(directory) for directory in no_code)]
    outside = [path for path in files if not path.is_relative_to(root)]
    if outside:
        raise UserError(f"--include {pattern}: {outside[0]} is not below {root}: copy it to that directory")
    if not files:
        raise UserError(f"--include {pattern}: there is no such file in {here}")
    return [str(path.relative_to(root)) for path in files]


def copy_code(run: RunDir, code: UserCode) -> None:
    """Create the run's `code/` and the file with the revision of the code."""
    copy_files(code, run.code)
    checksums = _copy_packages(run.packages)
    run.package_checksums.write_text("".join(f"{digest}  {name}\n" for name, digest in checksums.items()))
    if revision := code.revision:
        run.revision.write_text(f"{revision}\n")
    sync_file_system(run.code)  # without this, storage that fails now may leave all these files empty


def damaged_packages(run: RunDir) -> list[str]:
    """Return the names of the files of our packages in a run directory that are missing, or not as they were copied."""
    if not run.package_checksums.exists():
        return []  # the run of an earlier release
    known = [line.split("  ", 1) for line in run.package_checksums.read_text().splitlines()]
    damaged = [name for digest, name in known if _digest_of(run.packages / name) != digest]
    return damaged if known else [run.package_checksums.name]


def _digest_of(file: Path) -> str | None:
    try:
        return sha256_of(file)
    except FileNotFoundError:
        return None


def _copy_packages(target: Path) -> dict[str, str]:
    """Copy our packages into a new directory, with the modes that the umask gives to new files.

    Their byte code is copied, too: else each node would compile the same modules. Returns the SHA-256 of each file but
    the byte code, by its name.
    """
    source, checksums = Path(__file__).parents[2], dict[str, str]()
    for package in _PACKAGES:
        for directory, _, names in os.walk(source / package):
            new = target / Path(directory).relative_to(source)
            if new.name == "__pycache__":
                continue
            new.mkdir(parents=True)
            for name in names:
                text = Path(directory, name).read_bytes()
                (new / name).write_bytes(text)
                checksums[str((new / name).relative_to(target))] = hashlib.sha256(text).hexdigest()
                if name.endswith(".py") and (code := _byte_code(Path(directory, name), text)):
                    cache = Path(cache_from_source(new / name))
                    cache.parent.mkdir(exist_ok=True)
                    cache.write_bytes(code)
    return checksums


def _byte_code(source: Path, text: bytes) -> bytes | None:
    """Return a module's valid byte code, if any, in the form that Python uses whatever times files have (PEP 552)."""
    try:
        cached, modified = Path(cache_from_source(source)).read_bytes(), int(source.stat().st_mtime)
    except OSError:
        return None
    magic, flags, *recorded = struct.unpack("<4sIII", cached[:16].ljust(16, b"\0"))
    is_valid = magic == MAGIC_NUMBER and flags == 0 and recorded == [modified & 0xFFFFFFFF, len(text) & 0xFFFFFFFF]
    return struct.pack("<4sI", magic, 1) + source_hash(text) + cached[16:] if is_valid else None


def copy_files(code: UserCode, target: Path) -> None:
    """Copy the user's files into a new directory."""
    target.mkdir()
    if not code.in_place:
        # The script starts here, even if none of the copied files is here.
        (target / code.working_directory).mkdir(parents=True, exist_ok=True)
    for name in code.names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(code.root / name, target / name)
    for path in target.rglob("*"):
        # If a copy kept a mode that lets a group write, the group's members could run their own code as this user.
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
