"""Has messages about the run sent, beside the agent's own work, which never waits for them. Runs on compute nodes."""

import signal
import subprocess
import threading

from hpc.core.errors import TorchrelayError
from hpc.notification.delivery import is_due, run_delivery
from jobs.node_attempt import NodeAttempt, log
from jobs.stop_request import STOP_SIGNALS


def start_notifying(node: NodeAttempt) -> threading.Thread:
    """Send what is to be told of the run now, for at most half a minute.

    An agent that ends joins the thread, because its job ends its processes. What could not be sent is left to the
    supervisor.
    """
    thread = threading.Thread(target=_notify, args=(node,), daemon=True, name="notify")
    thread.start()
    return thread


def _notify(node: NodeAttempt) -> None:
    # The process inherits this. A requeue signals all processes of the job, and leaves them KillWait, 30 s by default.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if is_due(node.run, node.spec.notification):
            run_delivery(node.run)
    except (OSError, subprocess.SubprocessError, TorchrelayError) as error:
        log(f"messages about the run were not sent: {error}")
