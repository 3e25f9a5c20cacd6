"""Records the signals that ask this process to stop. Runs on every rank; imports no torch.

In a rank, the import of this module installs the signal handlers: a signal must not go unnoticed while the script then
imports torch, which takes seconds.
"""

import os
import signal
import threading
import time
from types import FrameType

from .this_rank import THIS_RANK

# Slurm sends SIGTERM at a preemption, and SIGUSR2 (--signal) some time before the time limit.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})


class StopSignals:
    """Records the stop signals that have arrived. The training loop acts on them after a step.

    The handler does not save, since saving inside a handler may hang (Lightning-AI/pytorch-lightning#21406).
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []

    def install(self) -> None:
        """Record SIGTERM, SIGUSR2 and the run's --stop-signal from now on, instead of their default actions."""
        for number in STOP_SIGNALS.union({signal.Signals[os.environ.get("TORCHRELAY_STOP_SIGNAL", "SIGTERM")]}):
            signal.signal(number, self._record)

    def is_installed(self) -> bool:
        """Return whether SIGTERM is recorded: neither the script nor a library has another handler for it."""
        return signal.getsignal(signal.SIGTERM) == self._record

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._received.append((number, time.monotonic()))

    def received(self) -> int:
        """Return the number of the first signal that arrived, or 0. Later signals change nothing."""
        return self._received[0][0] if self._received else 0

    def received_at(self) -> float | None:
        """Return time.monotonic() when the first signal arrived, or None."""
        return self._received[0][1] if self._received else None


signals = StopSignals()
# Programs other than ranks import this module, too, and handle signals in their own way.
if THIS_RANK.run_dir and "RANK" in os.environ and threading.current_thread() is threading.main_thread():
    signals.install()
