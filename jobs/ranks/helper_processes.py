"""Keeps Slurm's stop signals from the processes that a rank starts: loader workers, services, compilers.

Runs in the process of a rank. Slurm sends a signal to every process of a job step. If a helper process dies of it, the
rank fails before it has saved. To ignore the signal would not help: torch's loader workers and programs in Go install
handlers of their own. A *blocked* signal stays blocked in forks, in executed programs and in all that these start, so
helper processes start with the signals blocked.

A helper process must still end when its script ends it: what a rank sends by `os.kill`, for itself and for the
`terminate` of multiprocessing and subprocess, becomes SIGKILL. A SIGTERM that another process sends is noticed by the
rank's process wrapper (`ToldToEnd`).
"""

import contextlib
import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

from hpc.base.kernel import descendants, in_signal_mask
from jobs.compat import functions_that_start_processes

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})


def protect_helper_processes() -> None:
    """Block the stop signals in all processes that this rank will start."""
    for owner, name in functions_that_start_processes():
        setattr(owner, name, _starting(getattr(owner, name)))
    for name in ("kill", "killpg"):
        setattr(os, name, _ending(getattr(os, name), os.getpid()))


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def start_with_blocked_signals(*arguments: Any, **named: Any) -> Any:
        this = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            return start(*arguments, **named)
        finally:
            if os.getpid() == this:  # not in a fork
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return start_with_blocked_signals


def _ending(send: Callable[[int, int], None], rank: int) -> Callable[[int, int], None]:
    """Return a function that sends a signal as `send` does, but SIGKILL instead of a SIGTERM that would not arrive."""

    @wraps(send)
    def send_or_kill(pid: int, number: int, /) -> None:
        # A negative number names a process group. A rank itself blocks the signals while it starts a process.
        if number == signal.SIGTERM and pid not in {rank, os.getpid()} and _is_deaf(abs(pid)):
            number = signal.SIGKILL
        send(pid, number)

    return send_or_kill


def _is_deaf(pid: int) -> bool:
    """Return whether SIGTERM would not reach a process. What a rank ignores, programs that it executes ignore, too."""
    return any(in_signal_mask(pid, mask, signal.SIGTERM) for mask in ("SigBlk", "SigIgn"))


class ToldToEnd:
    """Kills helper processes of a rank that have got a SIGTERM from another process than Slurm or the rank.

    Runs in the rank's process wrapper. For example, `timeout` in a shell, or a helper process with a pool of its own,
    waits for the end of a process that it has sent SIGTERM.
    """

    def __init__(self) -> None:
        self._pending = set[int]()

    def look(self, rank: int) -> None:
        """Kill the helper processes in which SIGTERM was pending in the last look, too.

        Call this only while Slurm has sent no SIGTERM: a signal of Slurm reaches this process, too, in between.
        """
        helpers = (pid for pid in descendants(os.getpid()) if pid != rank)
        pending = {pid for pid in helpers if in_signal_mask(pid, "ShdPnd", signal.SIGTERM)}
        for pid in pending & self._pending:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL)
        self._pending = pending
