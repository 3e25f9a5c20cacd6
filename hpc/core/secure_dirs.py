"""Directories of our own in places that everybody can write to (/tmp, /dev/shm), and locks in them. Runs everywhere."""

import fcntl
import os
import pwd
import stat
from pathlib import Path

from hpc.core.errors import TorchrelayError

_MOST_LINKS = 10


def private_directory(place: Path) -> Path:
    """Our own directory `torchrelay-<uid>` in a place that everybody can write to.

    Raises:
        TorchrelayError: something is there that others could have put there, or can write to.
    """
    _check_path(place.absolute())
    root = place / f"torchrelay-{os.getuid()}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise TorchrelayError(
                f"{root} belongs to {owner(status.st_uid)} and is {stat.filemode(status.st_mode)}, not a directory "
                "that only you can use, so someone else may have put it there: remove it, or use another --stage-dir"
            ) from None
    return root


def _check_path(path: Path, links: int = 0) -> None:
    """Refuse a way on which somebody else could put another directory in the place of ours.

    Who owns `/` administers the machine; inside a user namespace that need not be user 0.
    """
    trusted = {0, os.getuid(), Path("/").stat().st_uid}
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if status.st_uid not in trusted:
            raise TorchrelayError(
                f"{part} on the way to {path} belongs to {owner(status.st_uid)}, who could put anything there: "
                "use another --stage-dir"
            )
        if stat.S_ISLNK(status.st_mode):
            if links > _MOST_LINKS:
                raise TorchrelayError(f"{path} is a link that leads to links without end: use another --stage-dir")
            _check_path(Path(os.path.normpath(part.parent / part.readlink())), links + 1)
        elif _others_may_rename(status):
            raise TorchrelayError(
                f"{part} is {stat.filemode(status.st_mode)}: others may rename what is in it, so it is no place for "
                "data that nobody else is to change: use another --stage-dir, or have its sticky bit set (chmod +t)"
            )


def _others_may_rename(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:
        return False
    # A group of the user's own name and number is nobody else.
    own_group = status.st_gid == os.getgid() == os.getuid()
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not own_group))


def owner(uid: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def open_lock(path: Path) -> int:
    """Open a lock file, which nobody holds by that, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock, unless another process holds it. The kernel releases the lock of one that is killed.

    Args:
        descriptor: of the open lock file.
        shared: with others who share it; by default alone.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
