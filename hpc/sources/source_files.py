"""Names of the files of a source, and reads that storage may interrupt. Runs on the login node and on every node."""

import os
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from hpc.base.errors import TorchrelayError, UserError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
# A restarting server or a stale NFS handle recovers within seconds.
_RETRY_SECONDS = (0.5, 2.0, 5.0)
_Result = TypeVar("_Result")


def is_archive(path: Path) -> bool:
    """Return whether a path is a file with the name of an archive: staging unpacks it."""
    return path.name.endswith(ARCHIVES) and path.is_file()


def inside_name(name: str) -> str:
    """Normalize a path below a directory. Raises UserError if it is absolute, contains `..`, or is empty."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise UserError(f"{name!r} leads out of its directory: rename that file of the data set")
    return str(path)


def read_with_retries(path: str, read: Callable[[], _Result], cancelled: threading.Event) -> _Result:
    """Call `read`, and again after errors of storage. Raises TorchrelayError after the last try, or if cancelled."""
    for pause in (*_RETRY_SECONDS, None):
        try:
            return read()
        except OSError as error:
            if pause is None or cancelled.wait(pause):
                raise TorchrelayError(
                    f"{path} could not be read on {os.uname().nodename} ({error.strerror or error}), "
                    f"{len(_RETRY_SECONDS) + 1} times: restore it, or leave that node out with --exclude"
                ) from error
    raise AssertionError
