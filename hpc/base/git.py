"""Asks git about a directory. The answer is None or empty without git or a repository. Runs everywhere."""

import subprocess
from pathlib import Path

from hpc.base.errors import TorchrelayError


def git_revision(directory: Path) -> str | None:
    """Return the checked-out commit, with `+dirty` if tracked files differ from it; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit.strip() + ("+dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def repository(directory: Path) -> Path | None:
    """Return the top directory of the repository that contains a directory; None outside a repository.

    The answer does not depend on git, which refuses, for example, a repository of another user.
    """
    return next((each for each in (directory, *directory.parents) if (each / ".git").exists()), None)


def listed_files(root: Path, *options: str) -> list[str]:
    """Return what `git ls-files` lists in a repository: tracked files or, with options, others, relative to `root`.

    Raises:
        TorchrelayError: git is missing, or cannot read the repository; the message says why.
    """
    output = _run(root, "ls-files", "-z", *options)
    return [name for name in output.decode(errors="surrogateescape").split("\0") if name]


def is_listed_as_untracked(path: Path) -> bool:
    """Return whether `git status` lists a directory, or something in it, as untracked."""
    return bool(_git(path, "ls-files", "--others", "--exclude-standard", "--directory", "."))


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        return _run(directory, *arguments).decode(errors="surrogateescape")
    except TorchrelayError:
        return None


def _run(directory: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise TorchrelayError(f"git cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise TorchrelayError(said.removeprefix("fatal: ") or f"git {arguments[0]} failed")
    return done.stdout
