"""Records the signals that ask this process to stop. Runs on every rank; imports no torch.

The handlers of a script's rank are installed when this module is imported: the import of torch takes seconds, in which
a signal must not go unnoticed.
"""

import os
import signal
import threading
import time
from types import FrameType

from .this_rank import THIS_RANK

# Preemption sends SIGTERM. Slurm's --signal sends SIGUSR2 some time before the time limit.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})


class StopSignals:
    """Keeps the stop signals that have arrived. A handler only records them; the loop acts on them after a step.

    Saving inside a handler hangs now and then (Lightning-AI/pytorch-lightning#21406).
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []

    def install(self, *others: signal.Signals) -> None:
        """Record the signals that ask to stop, and `others`, from now on."""
        for number in STOP_SIGNALS.union(others):
            signal.signal(number, self._record)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._received.append((number, time.monotonic()))

    def received(self) -> int:
        """Return the number of the first signal that arrived, 0 for none. A second one changes nothing."""
        return self._received[0][0] if self._received else 0

    def received_at(self) -> float | None:
        """Return time.monotonic() when the first signal arrived; None if none has."""
        return self._received[0][1] if self._received else None


signals = StopSignals()
# Only in a rank: other programs import this module too, and handle signals in their own way.
if THIS_RANK.run_dir and "RANK" in os.environ and threading.current_thread() is threading.main_thread():
    signals.install(signal.Signals[os.environ.get("TORCHRELAY_STOP_SIGNAL", "SIGTERM")])
