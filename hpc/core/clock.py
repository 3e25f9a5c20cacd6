"""Times that can be compared even if somebody sets the clock meanwhile. Runs in the agents of a node."""

import time

_OFFSET_SECONDS = time.time() - time.monotonic()


def steady_time(monotonic: float | None = None) -> float:
    """Seconds since the epoch, now or at a time of time.monotonic(), as the clock was when this process started.

    After the clock was set back by an hour, each rank that starts would seem older than the last failure, and for an
    hour no failure or hang would count.
    """
    return _OFFSET_SECONDS + (time.monotonic() if monotonic is None else monotonic)
