"""How data get from shared storage to the disks of several nodes: the ways that benchmarks/staging compares.

A node is a directory; on the testbed's Slurm, for sbcast, it is one of its nodes.
"""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.staging.throttle import Storage

NODE = Path(__file__).with_name("node.py")
# Where sbcast puts it: each of the testbed's nodes has its own /tmp.
_REMOTE = "/tmp/staging-benchmark"  # noqa: S108 - removed by name afterwards


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What there is to copy, and where to."""

    storage: Storage
    files: Path
    """A directory of images."""
    tar: Path
    """The same in one file."""
    disks: Path
    """A new directory: the disks of the nodes are below it."""
    allocations: dict[int, str] = field(default_factory=dict)
    """Slurm's job by number of nodes, for sbcast."""

    def disk(self, node: int) -> Path:
        """A node's disk."""
        path = self.disks / f"node-{node}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, command: list[str]) -> "subprocess.Popen[str]":
        """Start what reads from the storage."""
        return subprocess.Popen(command, env=self.storage.environment, stdout=subprocess.PIPE, text=True)

    def run(self, command: list[str]) -> None:
        """Run it to its end."""
        process = self.start(command)
        process.communicate()
        if process.returncode:
            sys.exit(f"{command} failed")


class Cost(NamedTuple):
    """Of one way."""

    seconds: float
    """Until the last node has every file."""
    cpu_seconds: float
    """Of all nodes together."""


Method = Callable[[Bench, int], Cost]
Commands = Callable[[Bench, Path], list[list[str]]]


def _each_node(commands: Commands) -> Method:
    """Every node runs these commands, one after the other."""

    def measured(bench: Bench, nodes: int) -> Cost:
        def one(node: int) -> None:
            for command in commands(bench, bench.disk(node)):
                bench.run(command)

        began = time.monotonic(), _children_cpu()
        with ThreadPoolExecutor(nodes) as pool:
            list(pool.map(one, range(nodes)))
        return Cost(time.monotonic() - began[0], _children_cpu() - began[1])

    return measured


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cp(bench: Bench, disk: Path) -> list[list[str]]:
    return [["cp", "-r", str(bench.files), f"{disk}/data"]]


def _rsync(bench: Bench, disk: Path) -> list[list[str]]:
    return [["rsync", "-a", f"{bench.files}/", f"{disk}/data/"]]


def _cp_and_untar(bench: Bench, disk: Path) -> list[list[str]]:
    local = f"{disk}/{bench.tar.name}"
    return [["cp", str(bench.tar), local], ["tar", "-x", "-f", local, "-C", str(disk)]]


def _staged(bench: Bench, nodes: int, source: Path) -> Cost:
    """Ours: agents that are running and know each other, as they do when a job stages."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    common = [sys.executable, str(NODE), f"--nodes={nodes}", f"--port={port}", f"--run={bench.disks / 'run'}"]
    with ExitStack() as held:
        started = [
            held.enter_context(
                bench.start([*common, f"--rank={rank}", f"--source={source}", f"--stage-dir={bench.disk(rank)}"])
            )
            for rank in range(nodes)
        ]
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    if any(answer["fallback"] or answer["in_place"] for answer in told):
        print(f"staging fell back: {told}", file=sys.stderr)
    seconds = max(answer["ended"] for answer in told) - told[0]["began"]
    return Cost(seconds, sum(answer["cpu"] for answer in told))


def _staged_files(bench: Bench, nodes: int) -> Cost:
    return _staged(bench, nodes, bench.files)


def _staged_tar(bench: Bench, nodes: int) -> Cost:
    return _staged(bench, nodes, bench.tar)


def _sbcast(bench: Bench, nodes: int) -> Cost:
    """The archive through Slurm's own fan-out, then unpacked by every node. The CPU time is without the nodes'."""
    job = bench.allocations[nodes]
    began = time.monotonic(), _children_cpu()
    bench.run(["sbcast", f"--jobid={job}", "--force", str(bench.tar), f"{_REMOTE}.tar"])
    slurm_step(job, f"mkdir {_REMOTE} && tar -x -f {_REMOTE}.tar -C {_REMOTE}")
    cost = Cost(time.monotonic() - began[0], _children_cpu() - began[1])
    slurm_step(job, f"test $(find {_REMOTE} -type f | wc -l) = {sum(1 for _ in bench.files.glob('*/*'))}")
    slurm_step(job, f"rm -r {_REMOTE} {_REMOTE}.tar")
    return cost


def slurm_step(job: str, script: str) -> None:
    """Run a line of shell on every node of a job."""
    subprocess.run(["srun", f"--jobid={job}", "--ntasks-per-node=1", "--chdir=/", "sh", "-c", script], check=True)


def allocate(nodes: int) -> str:
    """Slurm's job of so many nodes, to run steps in."""
    command = ["salloc", "--no-shell", f"--nodes={nodes}", "--ntasks-per-node=1", "--time=30"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ).stderr
    match = re.search(r"Granted job allocation (\d+)", said)
    if match is None:
        sys.exit(f"salloc gives no nodes: {said.strip()}")
    return match[1]


OURS = "torchrelay"
METHODS: dict[str, Method] = {
    OURS: _staged_files,
    "cp -r": _each_node(_cp),
    "rsync -a": _each_node(_rsync),
    f"{OURS}, tar": _staged_tar,
    "cp, tar x": _each_node(_cp_and_untar),
}
SBCAST: dict[str, Method] = {"sbcast, tar x": _sbcast}
