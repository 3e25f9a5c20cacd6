"""Runs the user's own check of a node (--health-check). Runs in every agent, before the ranks of a round start."""

import os
import signal
import subprocess
import time
from contextlib import suppress

from hpc.base.environment import PYTHONPATH
from hpc.base.errors import BadNodeError
from jobs.node_attempt import NodeAttempt
from jobs.ranks.monitor import NodeMonitor

_SECONDS, _KILL_SECONDS, _POLL_SECONDS = 60.0, 5.0, 0.1


def check_health(node: NodeAttempt, monitor: NodeMonitor) -> None:
    """Run the command on this node if there is one. Its output goes to the job's log.

    Raises:
        BadNodeError: the command failed, or did not end within a minute.
    """
    command = node.spec.recovery.health_check
    if command is None:
        return
    flag, deadline = f"--health-check {command!r}", time.monotonic() + _SECONDS
    environment = {**os.environ, "PYTHONPATH": os.environ.get(PYTHONPATH, "")}  # not that of our packages
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=node.spec.start_directory(node.run), env=environment, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        while (exit_code := process.poll()) is None and not monitor.must_leave:
            monitor.poll()
            if time.monotonic() > deadline:
                raise BadNodeError(f"{flag} did not end within {_SECONDS:.0f} s on {node.host}")
            time.sleep(_POLL_SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may wait in the kernel for the device that it checks
                process.wait(_KILL_SECONDS)
    if exit_code:
        raise BadNodeError(f"{flag} failed on {node.host} with exit code {exit_code}: see hpc logs --all")
