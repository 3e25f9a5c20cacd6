"""The code snapshot: what runs is what was there at submission. Runs on the login node.

`code/` holds the tracked files of the user's repository as they are in the working tree, and below
`.torchrelay/` our own three packages, so that neither an edit nor an upgrade changes a run that waits or resumes.
"""

import shutil
import subprocess
from pathlib import Path

from hpc.core.errors import UserError

PACKAGES_DIRECTORY = ".torchrelay"
_PACKAGES = ("hpc", "jobs", "training")


def git_root(directory: Path) -> Path | None:
    """The root of the git repository that holds a directory; None outside of one."""
    top = _git(directory, "rev-parse", "--show-toplevel")
    return Path(top.rstrip("\n")) if top else None


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints, or None where it refuses (no repository, not ours) or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None


def git_revision(directory: Path) -> str | None:
    """The commit that is checked out there, with `+changes` if tracked files differ from it; None: no repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit.strip() + ("+changes" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def copy_code(code: Path, working_directory: Path, script: tuple[str, ...]) -> None:
    """Fill `code/`.

    Raises:
        UserError: the user's script would not be in it.
    """
    root = git_root(working_directory)
    code.mkdir()
    if root is not None:
        _copy_tracked(root, code)
    if script and not (code / script_in_code_copy(script[0], root, working_directory)).is_file():
        raise UserError(
            f"{script[0]} is not tracked by git, so it would not be in the snapshot: type git add {script[0]}"
        )
    own = code / PACKAGES_DIRECTORY
    own.mkdir()
    if revision := git_revision(working_directory):
        (own / "revision").write_text(f"{revision}\n")
    source = Path(__file__).parents[2]
    for package in _PACKAGES:
        shutil.copytree(source / package, own / package, ignore=shutil.ignore_patterns("__pycache__"))


def script_in_code_copy(script: str, root: Path | None, working_directory: Path) -> Path:
    """Where the user's script lies below `code/`.

    Raises:
        UserError: it is in no repository, or in another one.
    """
    path = (working_directory / script).resolve()
    if root is None or not path.is_relative_to(root.resolve()):
        raise UserError(f"{script} is in no git repository of {working_directory}: type git init and git add {script}")
    return path.relative_to(root.resolve())


def _copy_tracked(root: Path, code: Path) -> None:
    """Copy the tracked files as they are now; one that was deleted but not committed is not there to copy."""
    listed = _git(root, "ls-files", "-z") or ""
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():
            target = code / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
