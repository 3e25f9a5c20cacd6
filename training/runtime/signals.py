"""The request to stop, as a signal handler leaves it behind. Runs on every rank; imports no torch.

The handler only sets a flag: saving inside a handler hangs now and then (Lightning-AI/pytorch-lightning#21406). It
must be in place before torch takes its seconds to be imported.
"""

import signal
import time
from types import FrameType

# Preemption sends SIGTERM; Slurm's --signal, some time before the limit, SIGUSR2.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

_received: list[tuple[int, float]] = []


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))


def install() -> None:
    """Make the signals leave their number, nothing else, from now on."""
    for number in _SIGNALS:
        signal.signal(number, _remember)


def ignore() -> None:
    """Be deaf from now on, when the work is done: Python takes its handlers away while it shuts down, and would die.

    torchrun takes a rank that a signal killed for a failed one, and starts all of them again.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> int:
    """The number of the first signal that arrived, 0 for none. A second one changes nothing."""
    return _received[0][0] if _received else 0


def received_at() -> float | None:
    """time.monotonic() when the first signal arrived here; None: none has."""
    return _received[0][1] if _received else None
