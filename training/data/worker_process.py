"""Makes processes that a rank starts, such as loader workers, small, and end with the rank. Imports no torch."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterable

from hpc.base import kernel


def release_freed_memory() -> None:
    """Return freed memory to the kernel before a fork. Do nothing if the C library is not glibc.

    Otherwise, when the rank uses this memory again after the fork, the kernel copies it, and the worker keeps the old
    pages.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def die_with_parent(ignored: Iterable[signal.Signals]) -> None:
    """Make this worker process ignore the signals that its parent handles, and die when the parent dies."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kernel.set_parent_death_signal()
    parent = multiprocessing.parent_process()
    # If the parent died before that call, the kernel sends no signal.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
