"""A child process that does not outlive its parent. Runs everywhere; imports little, for processes that start often."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)


def set_parent_death_signal() -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Survives exec, not fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
