"""Asks git about a directory. The answer is None or empty without git or a repository. Runs everywhere."""

import subprocess
from pathlib import Path


def git_revision(directory: Path) -> str | None:
    """Return the checked-out commit, with `+dirty` if tracked files differ from it; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit.strip() + ("+dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def repository(directory: Path) -> Path | None:
    """Return the top directory of the repository that contains a directory; None outside a repository."""
    top = _git(directory, "rev-parse", "--show-toplevel")
    return Path(top.rstrip("\n")) if top else None


def tracked_files(root: Path) -> list[str]:
    """Return the existing files that git tracks below `root`, as paths relative to it."""
    names = (_git(root, "ls-files", "-z") or "").split("\0")
    return [name for name in names if name and (root / name).is_file()]


def is_listed_as_untracked(path: Path) -> bool:
    """Return whether `git status` lists a directory, or something in it, as untracked."""
    return bool(_git(path, "ls-files", "--others", "--exclude-standard", "--directory", "."))


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output; None if git is missing or fails, for example outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None
