"""The copy of the code that a run executes, made at submission on the login node; git revisions, on any machine.

`code/` holds the tracked files of the user's repository as they are in the working tree, and in `.torchrelay/` our
three packages. So neither an edit nor an upgrade changes a run that waits or resumes.
"""

import shutil
import stat
import subprocess
from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.rundir import RunDir


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails (no repository, another user's) or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None


def git_revision(directory: Path) -> str | None:
    """The checked out commit, with `+dirty` if tracked files differ from it; None outside of a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit.strip() + ("+dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def copy_code(run: RunDir, working_directory: Path, script: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Make `code/`, from the repository that the working directory is in, if any, and our packages.

    `script` is the user's script, by its path from the working directory, and its arguments; empty for our trainer.
    Returns the same with the script's path below `code/`.

    Raises:
        UserError: the script is not tracked by that repository.
    """
    top = _git(working_directory, "rev-parse", "--show-toplevel")
    root = Path(top.rstrip("\n")) if top else None
    run.code.mkdir()
    if root is not None:
        # As they are now, except those that are deleted but not committed.
        for name in filter(None, (_git(root, "ls-files", "-z") or "").split("\0")):
            if (root / name).is_file():
                (run.code / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, run.code / name)
    if script:
        name, path = script[0], (working_directory / script[0]).resolve()
        if root is None or not path.is_relative_to(root.resolve()):
            raise UserError(f"{name} is in no git repository of {working_directory}: type git init and git add {name}")
        inside = path.relative_to(root.resolve())
        if not (run.code / inside).is_file():
            raise UserError(f"{name} is not tracked by git, so the run would not have it: type git add {name}")
        script = (str(inside), *script[1:])
    run.packages.mkdir()
    if revision := git_revision(working_directory):
        run.revision.write_text(f"{revision}\n")
    source = Path(__file__).parents[2]
    for package in ("hpc", "jobs", "training"):
        shutil.copytree(source / package, run.packages / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in run.code.rglob("*"):
        # Where a group shares files, its members could otherwise change what the run executes as its user.
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return script
