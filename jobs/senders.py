"""Sends messages to people, and metrics, while an attempt lasts. Runs on compute nodes.

No sender can stop or delay the training.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpc.services.notification.delivery import is_due, run_delivery
from hpc.services.tracking import sender
from jobs.node_attempt import NodeAttempt, log
from jobs.stop_request import STOP_SIGNALS

# At a run's end, the agent waits at most this long until the last metrics are sent: the job's end kills the senders.
_LAST_SECONDS = 30.0

# --- messages about the run ---


def notify(node: NodeAttempt) -> None:
    """Send the messages that are due, for at most half a minute. The supervisor sends what is left."""
    # The sender inherits the mask, so that the signal of a requeue does not end it: KillWait leaves it 30 s by default.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if is_due(node.run, node.spec.notification):
            run_delivery(node.run)
    except Exception as error:  # noqa: BLE001 - not even a defect here may change how the attempt ends
        log(f"messages about the run were not sent: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the metrics: one process for each tracker, next to the training ---


@contextmanager
def sending(node: NodeAttempt) -> Iterator[None]:
    """While an attempt lasts, run one process for each tracker. It sends the metrics to this tracker."""
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
        deadline = time.monotonic() + (_LAST_SECONDS if started and node.history().outcome else 0.0)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
