"""How long ranks may take to save after Slurm's signals."""

import signal

import pytest
from support.events import recovery_of, script_spec, submitted

from hpc.run.events.history import History
from jobs.stop_request import StopRequest

USR2, TERM = signal.SIGUSR2, signal.SIGTERM


@pytest.mark.parametrize(
    ("received", "first", "seconds"),
    [([USR2], "SIGUSR2", 290.0), ([TERM], "SIGTERM", 10.0), ([USR2, TERM], "SIGUSR2", 10.0)],
)
def test_sigterm_says_that_sigkill_follows(received: list[signal.Signals], first: str, seconds: float) -> None:
    """SIGUSR2 announces the time limit, minutes before it, or, on some clusters, a preemption (GraceTime)."""
    stop = StopRequest()
    for number in received:
        stop.handle(number, None)
    spec = script_spec(recovery=recovery_of(signal_before="5m"))
    assert (stop.name, stop.save_timeout_seconds(spec, History([submitted(1.0, grace_seconds=20)]))) == (first, seconds)
