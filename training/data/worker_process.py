"""Makes processes that a rank starts, such as loader workers, end with the rank and not before. Imports no torch."""

import multiprocessing
import os
import signal
from collections.abc import Iterable

from hpc.base import kernel


def die_with_parent(ignored: Iterable[signal.Signals]) -> None:
    """Make this worker process ignore the signals that its parent handles, and die when the parent dies."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kernel.set_parent_death_signal()
    parent = multiprocessing.parent_process()
    # If the parent died before that call, the kernel sends no signal.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
