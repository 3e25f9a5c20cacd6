"""Sends messages about the run in a thread, so that the agent's work does not wait for them. Runs on compute nodes."""

import signal
import subprocess
import threading

from hpc.core.errors import TorchrelayError
from hpc.notification.delivery import is_due, run_delivery
from jobs.node_attempt import NodeAttempt, log
from jobs.stop_request import STOP_SIGNALS


def start_notifying(node: NodeAttempt) -> threading.Thread:
    """Start a thread that sends the messages that are due, for at most half a minute.

    An agent that ends joins the thread, because the job's end kills all processes. The supervisor sends what is left.
    """
    thread = threading.Thread(target=_notify, args=(node,), daemon=True, name="notify")
    thread.start()
    return thread


def _notify(node: NodeAttempt) -> None:
    # The sender inherits this. A requeue signals all processes of the job, and leaves them KillWait, 30 s by default.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if is_due(node.run, node.spec.notification):
            run_delivery(node.run)
    except (OSError, subprocess.SubprocessError, TorchrelayError) as error:
        log(f"messages about the run were not sent: {error}")
