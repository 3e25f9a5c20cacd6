"""Becomes a program that ignores SIGTERM and SIGUSR2 and dies with its parent. Runs between the agent and torchrun.

Runs as a script: `shield.py PROGRAM ARGS...`. Ignoring survives exec; and setting it here, in a process of its own,
loses no signal that is meant for the agent, which has threads and so must not run code between fork and exec.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - a list, no shell
