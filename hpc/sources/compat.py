"""Uses a private name of Python's tarfile. tests/jobs/test_compat_python.py fails if a new version lacks it."""

from collections.abc import Callable
from typing import Any


def check_tar_headers(kind: Any, check: Callable[[Any], None]) -> None:
    """Make `kind`, a subclass of TarInfo, call `check` on each header before tarfile reads the data after it.

    Checked against Python 3.11 to 3.14, where a comment names `_proc_member` as the method to override. The tarfile of
    3.13 and 3.14 no longer calls the public `frombuf`.
    """
    process = kind._proc_member

    def checked(header: Any, archive: Any) -> Any:
        check(header)
        return process(header, archive)

    kind._proc_member = checked
