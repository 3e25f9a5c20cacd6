"""The signals that ask an agent to stop, and how long its ranks may take to save. Runs on compute nodes."""

import signal
import time

from hpc.base.kernel import ENDING_SIGNALS
from hpc.run.events.history import History
from hpc.run.events.kinds import Submitted
from hpc.run.spec import RunSpec
from hpc.run.stop_times import KILL_WAIT_SECONDS, REQUEUE_SECONDS, save_timeout_seconds

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Records the first signal that asked this agent to stop, and whether SIGTERM came. The handler does no more."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_last = False
        """Whether SIGTERM has come. Slurm sends SIGKILL some time after it.

        SIGTERM may be the second signal, after a SIGUSR2 that announced a preemption instead of the time limit.
        """
        self._time = 0.0

    def install(self) -> None:
        """Handle the time limit's warning (SIGUSR2), Slurm's SIGTERM, and Ctrl-C; ignore the others.

        With `scancel --signal=USR1`, a user may tell the ranks something. All processes that this one starts inherit
        that the signal is ignored. So a rank ignores it, too, until its script handles it.
        """
        for number in ENDING_SIGNALS:
            signal.signal(number, self.handle if number in STOP_SIGNALS else signal.SIG_IGN)

    def handle(self, number: int, _frame: object) -> None:
        """Record the first signal, and whether SIGTERM has come."""
        self.is_last |= number == signal.SIGTERM
        if self.signal is None:
            self.signal, self._time = signal.Signals(number), time.monotonic()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str | None:
        """Name of the first signal; None before it has come."""
        return self.signal.name if self.signal else None

    @property
    def seconds(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self._time if self.signal else 0.0

    def save_timeout_seconds(self, spec: RunSpec, history: History) -> float:
        """Return the seconds from the first signal in which ranks may save: --grace-period, or what Slurm grants."""
        if spec.recovery.grace_period:
            return spec.recovery.grace_period.seconds
        if not self.is_last:
            return spec.stop_lead_seconds - REQUEUE_SECONDS
        # The newest submission that found a time has it from the partition (GraceTime) or the cluster (KillWait).
        graces = [event.grace_seconds for event in reversed(history.of(Submitted))]
        return save_timeout_seconds(next(filter(None, graces), KILL_WAIT_SECONDS))
