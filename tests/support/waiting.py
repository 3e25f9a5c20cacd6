"""Waits for conditions: tests wait for what has to happen, never for a time."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once a condition holds; fail after a time that only a broken program needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds:.0f} s in vain"
        time.sleep(0.02)
