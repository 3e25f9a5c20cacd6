"""Sends the job's comment, messages to people, and metrics while an attempt lasts. Runs on compute nodes.

No sender can stop or delay the training.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpc.base.errors import TorchrelayError
from hpc.base.files import last_json_line
from hpc.services.notification.delivery import is_due, run_delivery
from hpc.services.tracking import sender
from hpc.slurm import client as slurm
from jobs.node_attempt import NodeAttempt, log
from jobs.stop_request import STOP_SIGNALS

# Longer than a short epoch, because every change of the comment is a request to Slurm's controller.
_COMMENT_SECONDS = 30.0
# At a run's end, the agent waits at most this long until the last metrics are sent: the job's end kills the senders.
_LAST_SECONDS = 30.0

# --- the comment of the run's job, which `squeue -o %k` shows: run, attempt, epoch ---


@contextmanager
def commenting(node: NodeAttempt) -> Iterator[None]:
    """Keep the job's comment up to date while an attempt lasts, unless the user has given one (--sbatch comment=)."""
    is_given = any(option.partition("=")[0] == "comment" for option in node.spec.resources.sbatch)
    over = threading.Event()
    if node.on_slurm and not is_given:
        threading.Thread(target=_keep_up_to_date, args=(node, over), daemon=True, name="comment").start()
    try:
        yield
    finally:
        over.set()


def _keep_up_to_date(node: NodeAttempt, over: threading.Event) -> None:
    shown = ""
    while not over.is_set():
        text = comment(node)
        try:
            if text != shown:
                slurm.update(node.allocation.job_id, Comment=text)
                shown = text
        except TorchrelayError as error:
            log(f"the comment of this job is not up to date: {error}")
            return
        over.wait(_COMMENT_SECONDS)


def comment(node: NodeAttempt) -> str:
    """Return the comment: the run, the attempt, and the epoch of the last logged step if that is known."""
    epoch = (last_json_line(node.run.train_metrics) or {}).get("epoch")
    words = [node.run.name, f"attempt {node.attempt.attempt}", *([] if epoch is None else [f"epoch {epoch}"])]
    return ", ".join(words)


# --- messages about the run ---


def start_notifying(node: NodeAttempt) -> threading.Thread:
    """Start a thread that sends the messages that are due, for at most half a minute.

    An agent that ends joins the thread, because the job's end kills all processes. The supervisor sends what is left.
    """
    thread = threading.Thread(target=_notify, args=(node,), daemon=True, name="notify")
    thread.start()
    return thread


def _notify(node: NodeAttempt) -> None:
    # The sender inherits the mask, so that the signal of a requeue does not end it: KillWait leaves it 30 s by default.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if is_due(node.run, node.spec.notification):
            run_delivery(node.run)
    except (OSError, subprocess.SubprocessError, TorchrelayError) as error:
        log(f"messages about the run were not sent: {error}")


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
        if started:
            _wait(started, _LAST_SECONDS if node.history().outcome else 0.0)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
