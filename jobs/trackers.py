"""Sends the metrics of an attempt to the run's trackers, in processes of their own. Runs on the head node."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpc.tracking import sender
from jobs.node_attempt import NodeAttempt, log

# Wait for the last points of a run that has ended, because its job ends all processes; do not if it is interrupted.
_LAST_SECONDS = 30.0


@contextmanager
def sending(node: NodeAttempt) -> Iterator[None]:
    """Send the metrics of an attempt while it lasts."""
    started = list[subprocess.Popen[bytes]]()
    for service in node.spec.tracker:
        command = [sys.executable, "-P", "-m", sender.__name__, str(node.run.path), service, str(node.attempt.attempt)]
        try:
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        except OSError as error:
            log(f"{service} does not get the metrics: {error}")
    try:
        yield
    finally:
        for process in started:
            if process.stdin:
                process.stdin.close()
        if started:
            _wait(started, _LAST_SECONDS if node.history().outcome else 0.0)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
