"""The failures of `benchmarks/recovery` and `storm.py`. Runs as root on the testbed's machine.

A contender has no part in them: a rank is found in the step log, and killed from outside.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.hpc_commands import testbed
from benchmarks.recovery.contenders import Training
from hpc.cluster.testbed import lifecycle
from hpc.run.causes import JobState
from hpc.slurm.client import hostnames

# Seconds until Slurm marks a dead node down: its default.
SLURMD_TIMEOUT = 300


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What was done to a training."""

    at: float
    """Seconds since the epoch, just before."""
    killed_node: str | None = None
    """It is dead until it is revived."""


@contextmanager
def usual_slurm(nodes: int) -> Iterator[None]:
    """Start a testbed with a GPU on each node; it ends before the runs are removed, because their jobs write into them.

    Slurm has its defaults, except that on preemption it sends a job the signal that it has asked for, not SIGTERM.
    """
    with testbed(f"--nodes={nodes}", "--gpus-per-node=1", f"--slurmd-timeout={SLURMD_TIMEOUT}"):
        with Path(os.environ["SLURM_CONF"]).open("a") as file:
            file.write("SlurmctldParameters=preempt_send_user_signal\n")
        subprocess.run(["scontrol", "reconfigure"], check=True)
        yield


def signal_last_rank(training: Training, number: signal.Signals) -> Failure:
    """Send a signal to the last rank."""
    pid = training.last_rank()["pid"]
    at = time.time()
    os.kill(pid, number)
    return Failure(at=at)


def kill_node(training: Training) -> Failure:
    """Cut the power of the node that has the last rank and is not the first node."""
    head, all_nodes = nodes_of(training)
    last = training.last_rank()["host"]
    # torchrun numbers the ranks by itself: the last one may be on the first node.
    others = [name for name in all_nodes if name not in {head, last}]
    return _power_off(last if last != head else others[0])


def kill_first_node(training: Training) -> Failure:
    """Cut the power of the node with the batch script."""
    return _power_off(nodes_of(training)[0])


def preempt(training: Training) -> Failure:
    """Have an urgent job take the nodes; it ends at once when it has them."""
    _, all_nodes = nodes_of(training)
    at = time.time()
    subprocess.run([
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(all_nodes)}",
        f"--nodelist={','.join(all_nodes)}", "--job-name=urgent", "--output=/dev/null", "--wrap=true",
    ], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return Failure(at=at)


KINDS: dict[str, Callable[[Training], Failure]] = {
    "worker killed": partial(signal_last_rank, number=signal.SIGKILL),
    "node killed": kill_node,
    "first node killed": kill_first_node,
    "preempted": preempt,
    "hung": partial(signal_last_rank, number=signal.SIGSTOP),
}


def _power_off(name: str) -> Failure:
    at = time.time()
    lifecycle.kill_node(name)
    return Failure(at=at, killed_node=name)


def nodes_of(training: Training) -> tuple[str, tuple[str, ...]]:
    """Return the first node and all nodes of the running job: torchx has one job per node."""
    jobs = [job for job in training.jobs() if job.state is JobState.RUNNING]
    if not jobs:
        raise SystemExit(f"{training.name} has no running job")
    return jobs[0].batch_host, tuple(hostnames(",".join(job.nodes for job in jobs)))
