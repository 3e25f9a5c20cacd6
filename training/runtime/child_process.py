"""How worker processes end. Runs in them."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def leave_to_parent(signals: Iterable[signal.Signals]) -> None:
    """Ignore signals that the parent answers, but die with the parent, however it ends."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    # Of a parent that died before this, the kernel tells nothing.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
