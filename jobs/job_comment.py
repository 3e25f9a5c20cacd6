"""Keeps the job's comment up to date, which `squeue -o %k` shows: run, attempt, epoch. Runs on the head node."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpc.core.errors import TorchrelayError
from hpc.core.files import last_json_line
from hpc.slurm import client as slurm
from jobs.node_attempt import NodeAttempt, log

# An epoch may take a second, and every change is a request to Slurm's controller.
_SECONDS = 30.0


@contextmanager
def commenting(node: NodeAttempt) -> Iterator[None]:
    """Keep the comment up to date while an attempt lasts, unless the user has given one (--sbatch comment=)."""
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
                slurm.set_comment(node.allocation.job_id, text)
                shown = text
        except TorchrelayError as error:
            log(f"the comment of this job is not up to date: {error}")
            return
        over.wait(_SECONDS)


def comment(node: NodeAttempt) -> str:
    """Name the run, the attempt, and the epoch of the last logged step, if it is known."""
    epoch = (last_json_line(node.run.train_metrics) or {}).get("epoch")
    words = [node.run.name, f"attempt {node.attempt.attempt}", *([] if epoch is None else [f"epoch {epoch}"])]
    return ", ".join(words)
