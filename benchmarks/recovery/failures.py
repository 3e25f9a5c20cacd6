"""The failures of `benchmarks/recovery` and `storm.py`. Runs as root on the testbed's machine.

A contender has no part in them: a rank is found in the step log, and killed from outside.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.recovery.contenders import Training
from hpc.cluster.testbed import lifecycle
from hpc.cluster.testbed.layout import TestbedShape

# Seconds until Slurm marks a dead node down: its default.
SLURMD_TIMEOUT = 300
# The testbed's commands take turns.
_testbed = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What was done to a training."""

    at: float
    """Seconds since the epoch, just before."""
    killed_node: str | None = None
    """It is dead until it is revived."""


def build_testbed(nodes: int) -> None:
    """Start a testbed with a GPU on each node, and use it for all that is typed from here.

    Slurm has its defaults, except that on preemption it sends a job the signal that it has asked for, not SIGTERM.
    """
    lifecycle.down()
    lifecycle.up(TestbedShape(nodes=nodes, gpus_per_node=1, slurmd_timeout=SLURMD_TIMEOUT))
    configuration = lifecycle.PATHS.slurm_conf
    os.environ["SLURM_CONF"] = str(configuration)
    with configuration.open("a") as file:
        file.write("SlurmctldParameters=preempt_send_user_signal\n")
    subprocess.run(["scontrol", "reconfigure"], check=True)


def end_testbed() -> None:
    """End the testbed: nobody may write into the runs any more when they are removed."""
    with _testbed:
        lifecycle.down()


def kill_worker(training: Training) -> Failure:
    """Send SIGKILL to the last rank."""
    return _signal_last_rank(training, signal.SIGKILL)


def hang(training: Training) -> Failure:
    """Send SIGSTOP to the last rank."""
    return _signal_last_rank(training, signal.SIGSTOP)


def kill_node(training: Training) -> Failure:
    """Cut the power of the node that has the last rank and is not the head node."""
    head, all_nodes = _nodes(training)
    last = training.last_rank()["host"]
    # torchrun numbers the ranks by itself: the last one may be on the head node.
    others = [name for name in all_nodes if name not in {head, last}]
    return _power_off(last if last != head else others[0])


def kill_head_node(training: Training) -> Failure:
    """Cut the power of the node with the batch script."""
    return _power_off(_nodes(training)[0])


def preempt(training: Training) -> Failure:
    """Have an urgent job take the nodes; it ends at once when it has them."""
    _, all_nodes = _nodes(training)
    at = time.time()
    subprocess.run([
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(all_nodes)}",
        f"--nodelist={','.join(all_nodes)}", "--job-name=urgent", "--output=/dev/null", "--wrap=true",
    ], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return Failure(at=at)


KINDS: dict[str, Callable[[Training], Failure]] = {
    "worker killed": kill_worker,
    "node killed": kill_node,
    "head node killed": kill_head_node,
    "preempted": preempt,
    "hung": hang,
}


def revive(name: str) -> None:
    """Boot a killed node; Slurm learns that its jobs are gone."""
    with _testbed:
        lifecycle.revive_node(name)


def _signal_last_rank(training: Training, number: signal.Signals) -> Failure:
    pid = training.last_rank()["pid"]
    at = time.time()
    os.kill(pid, number)
    return Failure(at=at)


def _power_off(name: str) -> Failure:
    with _testbed:
        at = time.time()
        lifecycle.kill_node(name)
    return Failure(at=at, killed_node=name)


def _nodes(training: Training) -> tuple[str, tuple[str, ...]]:
    """Return the head node and all nodes of the running job: torchx has one job per node."""
    jobs = [job for job in training.jobs() if job.state == "RUNNING"]
    if not jobs:
        raise SystemExit(f"{training.name} has no running job")
    return jobs[0].head, tuple(name for job in jobs for name in job.nodes)
