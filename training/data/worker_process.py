"""Makes processes that a rank starts, such as loader workers, end with the rank and not before. Imports no torch."""

import multiprocessing
import signal
from collections.abc import Iterable

from hpc.base import kernel


def die_with_parent(ignored: Iterable[signal.Signals]) -> None:
    """Make this worker process ignore the signals that its parent handles, and die when the parent dies."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    kernel.die_with_parent(parent.pid if parent else None)
