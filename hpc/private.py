"""Directories of our own in places that everybody can write to (/tmp, /dev/shm), and locks in them. Runs everywhere."""

import fcntl
import os
import stat
from pathlib import Path

from hpc.errors import TorchrelayError


def private_directory(place: Path) -> Path:
    """Our own directory `torchrelay-<uid>` in a place that everybody can write to.

    Raises:
        TorchrelayError: something is there that others could have put there, or can write to.
    """
    root = place / f"torchrelay-{os.getuid()}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise TorchrelayError(
                f"{root} is not a directory that only you can use, so someone else may have put it there: "
                "remove it, or use another --stage-dir"
            ) from None
    return root


def open_lock(path: Path) -> int:
    """Open a lock file, which nobody holds by that, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take the lock, unless another process holds it. The kernel releases the lock of one that is killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
