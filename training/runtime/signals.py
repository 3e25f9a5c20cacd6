"""Signals of ranks and of their worker processes. Runs in both; imports no torch.

A rank's handler only records that it should stop, and the training loop acts on it: saving inside a handler hangs now
and then (Lightning-AI/pytorch-lightning#21406). Install the handlers before torch, whose import takes seconds.
"""

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

# Preemption sends SIGTERM; Slurm's --signal, some time before the limit, SIGUSR2.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

_received: list[tuple[int, float]] = []


def _record(number: int, _frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))


def install() -> None:
    """Record the signals that ask to stop, from now on."""
    for number in _STOP_SIGNALS:
        signal.signal(number, _record)


def ignore() -> None:
    """Ignore the signals that ask to stop: the work is done.

    Python removes its handlers while it shuts down, so a signal would kill this rank; torchrun would count that as a
    failure and restart all ranks.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> int:
    """The number of the first signal that arrived, 0 for none. A second one changes nothing."""
    return _received[0][0] if _received else 0


def received_at() -> float | None:
    """time.monotonic() when the first signal arrived; None: none has."""
    return _received[0][1] if _received else None


def die_with_parent(ignored: Iterable[signal.Signals]) -> None:
    """In a worker process: ignore signals that the parent handles, and be killed when the parent dies."""
    import multiprocessing  # noqa: PLC0415  # a rank installs its handlers first: these two would delay that by 10 ms

    from hpc.core import kernel  # noqa: PLC0415

    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kernel.set_parent_death_signal()
    parent = multiprocessing.parent_process()
    # The kernel sends nothing if the parent died before the call.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
