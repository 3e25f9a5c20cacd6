"""Measures the silence of other agents without the time in which this agent was suspended. Runs in every agent.

Slurm stops all processes of a job that it suspends (SUSPEND, GANG), and a virtual machine stops while it is moved: a
stopped agent hears nothing. A thread that only ticks tells such a pause from a loop that waits for slow storage.
"""

import threading
import time

_TICK_SECONDS, _SUSPENDED_SECONDS = 0.1, 2.0


class AgentClock:
    """Measures the time since an event, at most since the end of this agent's last suspension."""

    def __init__(self) -> None:
        self._ticked = self._resumed = time.monotonic()
        threading.Thread(target=self._keep_ticking, daemon=True, name="agent-clock").start()

    def _keep_ticking(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            # Set _resumed before _ticked, because `since` reads _ticked first.
            self._resumed = now if now - self._ticked > _SUSPENDED_SECONDS else self._resumed
            self._ticked = now

    def since(self, moment: float) -> float:
        """Return the seconds from a time.monotonic() value, or from the end of a later suspension, to the last tick."""
        ticked = self._ticked
        return max(0.0, ticked - max(moment, self._resumed))
