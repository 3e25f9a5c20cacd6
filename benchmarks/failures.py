"""The failures of `recovery.py` and `storm.py`, and what they leave on the testbed's nodes. Runs as root on its machine.

A contender has no part in them: a rank is found in the step log, and killed from outside.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import step_log
from contenders import Training

from hpc.testbed import lifecycle, nodes
from hpc.testbed.layout import TestbedShape

# The testbed's commands take turns.
_testbed = threading.Lock()
_SLURM = ("slurmd", "slurmstepd")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What was done to a training."""

    at: float
    """Seconds since the epoch, just before."""
    job_nodes: tuple[str, ...]
    killed_node: str | None = None
    """It is dead until it is revived."""


def build_testbed(num_nodes: int, slurmd_timeout: int) -> None:
    """Start a testbed with a GPU on each node, and use it for all that is typed from here."""
    lifecycle.up(TestbedShape(nodes=num_nodes, gpus_per_node=1, slurmd_timeout=slurmd_timeout))
    os.environ["SLURM_CONF"] = str(lifecycle.status().slurm_conf)


def kill_worker(training: Training) -> Failure:
    """SIGKILL to the last rank."""
    return _signal_last_rank(training, signal.SIGKILL)


def hang(training: Training) -> Failure:
    """SIGSTOP to the last rank."""
    return _signal_last_rank(training, signal.SIGSTOP)


def kill_node(training: Training) -> Failure:
    """Cut the power of the node that has the last rank and is not the head node."""
    head, all_nodes = _nodes(training)
    ranks = step_log.ranks(training.log())
    members = [ranks[rank]["host"] for rank in sorted(ranks, reverse=True)]
    return _power_off(next(name for name in members if name != head), all_nodes)


def kill_head_node(training: Training) -> Failure:
    """Cut the power of the node with the batch script."""
    head, all_nodes = _nodes(training)
    return _power_off(head, all_nodes)


def preempt(training: Training) -> Failure:
    """Have an urgent job take the nodes; it ends at once when it has them."""
    _, all_nodes = _nodes(training)
    at = time.time()
    subprocess.run([
        "sbatch", "--partition=urgent", "--exclusive", f"--nodes={len(all_nodes)}",
        f"--nodelist={','.join(all_nodes)}", "--job-name=urgent", "--output=/dev/null", "--wrap=true",
    ], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return Failure(at=at, job_nodes=all_nodes)


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
    _, all_nodes = _nodes(training)
    ranks = step_log.ranks(training.log())
    at = time.time()
    os.kill(ranks[max(ranks)]["pid"], number)
    return Failure(at=at, job_nodes=all_nodes)


def _power_off(name: str, all_nodes: tuple[str, ...]) -> Failure:
    with _testbed:
        at = time.time()
        lifecycle.kill_node(name)
    return Failure(at=at, job_nodes=all_nodes, killed_node=name)


def _nodes(training: Training) -> tuple[str, tuple[str, ...]]:
    """The head node and all nodes of the running job: torchx has one job per node."""
    jobs = [job for job in training.jobs() if job.state == "RUNNING"]
    if not jobs:
        raise SystemExit(f"{training.name} has no running job")
    return jobs[0].head, tuple(name for job in jobs for name in job.nodes)


# --- what is left behind ---


def left_behind(training: Training, failure: Failure) -> str:
    """What a recovered training no longer uses, and still has: processes, files, nodes."""
    running = {name for job in training.jobs() if job.state == "RUNNING" for name in job.nodes}
    found = []
    current = {entry["pid"] for entry in step_log.ranks(training.log()).values()}
    old = {entry["pid"] for entry in training.log() if entry["event"] == "start"} - current
    stale = [pid for pid in old if _is_alive(pid)]
    abandoned = [name for name in failure.job_nodes if name not in running and name != failure.killed_node]
    stale += [pid for name in abandoned for pid in _processes(name) if pid not in stale]
    found += [f"{len(stale)} process{'es' if len(stale) > 1 else ''}"] if stale else []
    found += [text] if (text := files_on(abandoned)) else []
    waiting = [job for job in training.jobs() if job.state == "COMPLETING"]
    found += [f"GPUs of {len(job.nodes)} nodes allocated to an ending job" for job in waiting]
    return ", ".join(found) or "nothing"


def left_at_the_end(names: Iterable[str]) -> str:
    """What is on nodes when their jobs are gone."""
    names = list(names)
    processes = sum(len(_processes(name)) for name in names)
    found = [f"{processes} processes"] if processes else []
    found += [text] if (text := files_on(names)) else []
    return ", ".join(found) or "nothing"


def files_on(names: Iterable[str]) -> str:
    """The files in the nodes' /tmp and /dev/shm."""
    sizes = [
        path.stat().st_size
        for name in names
        for root in _roots(name)
        for place in ("tmp", "dev/shm")
        for path in (root / place).rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    return f"{len(sizes)} files of {sum(sizes) / 1e6:.1f} MB" if sizes else ""


def _processes(name: str) -> list[int]:
    """Those on a node, without Slurm's own."""
    return [pid for pid in nodes.processes(lifecycle.PATHS.node_net(name)) if _command(pid) not in (*_SLURM, "")]


def _roots(name: str) -> list[Path]:
    """The node's file system, as its slurmd sees it."""
    pids = nodes.processes(lifecycle.PATHS.node_net(name))
    return [Path(f"/proc/{pid}/root") for pid in pids if _command(pid) == "slurmd"][:1]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
