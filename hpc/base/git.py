"""Asks git about a directory. Without git or a repository the answer is empty. Runs everywhere."""

import subprocess
from pathlib import Path


def git_revision(directory: Path) -> str | None:
    """Return the checked out commit, with `+dirty` if tracked files differ; None outside of a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit.strip() + ("+dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def repository(directory: Path) -> Path | None:
    """Return the top of a directory's work tree; None outside of a repository."""
    top = _git(directory, "rev-parse", "--show-toplevel")
    return Path(top.rstrip("\n")) if top else None


def tracked_files(root: Path) -> list[str]:
    """Return the files that git tracks and that exist, as paths relative to the top of the repository."""
    names = (_git(root, "ls-files", "-z") or "").split("\0")
    return [name for name in names if name and (root / name).is_file()]


def is_listed_as_untracked(path: Path) -> bool:
    """Return whether `git status` lists something in a directory as untracked."""
    return bool(_git(path, "ls-files", "--others", "--exclude-standard", "--directory", "."))


def _git(directory: Path, *arguments: str) -> str | None:
    """Return the output of git; None if git is not installed, or fails (no repository, or another user's)."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None
