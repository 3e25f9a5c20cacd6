"""Staging against what people do by hand: wall time to every node's disk, and bytes read from shared storage.

    .venv/bin/python -m benchmarks.staging

Makes 10,000 different JPEG files of about 110 KB, and a tar of them. Then 1, 2 and 4 nodes get them: by ours
(`torchrelay`: the files; `torchrelay, tar`: the archive, unpacked), and by each node for itself, all at once, with
`cp -r`, `rsync -a`, and `cp` of the archive with `tar x`. A node is a directory of its own, by default in memory: the
nodes have a disk each, this machine has one for all. Ours are the processes that run in a job, which wait for the
start; the others' start counts.

Shared storage is the source seen through throttle.c: one token bucket for the readers of all nodes, and each opening
of a file takes longer; `unthrottled` without either. In both cases the kernel has all files in memory (they are read
before each measurement): the storage is what the throttle says, not this machine's disk, which would be read once for
all nodes anyway. The bytes that are read from it are counted there, for all alike. The CPU time is that of all nodes
together, which share this machine's cores here, and have their own in a cluster.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Contender, Findings, Flags, Row, Sample, benchmark, say, spread, take_turns
from benchmarks.photos import photo
from benchmarks.staging.throttle import MB, Speed, Storage
from jobs.staging.store import is_memory

NODE = Path(__file__).with_name("node.py")
OURS = "torchrelay"
_CLASSES, _PICTURES = 100, 16
# A comment in a JPEG file is at most so long.
_COMMENT_BYTES = 65_000
# On a node: the archive, and what is unpacked of it.
_COPIES, _SPARE_BYTES = 2, 1_000 * MB


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    files: int = 10_000
    """Files of the data set."""
    nodes: tuple[int, ...] = (1, 2, 4)
    """Numbers of nodes."""
    rate: float = 200.0
    """Rate of the throttled storage, in MB/s for all readers together."""
    open_ms: float = 1.0
    """How much longer each opening of a file takes on it, in ms."""
    turns: int = 3
    """Turns of each way."""
    source: Path = Path("/var/tmp")  # noqa: S108 - a new directory in it
    """Where to make the files, in a directory that is removed afterwards."""
    disks: Path = Path("/dev/shm")  # noqa: S108 - a new directory in it
    """Where the nodes' disks are, likewise."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What there is to copy, and where to."""

    storage: Storage
    files: Path
    """A directory of images."""
    tar: Path
    """An archive with these images."""
    disks: Path
    """A new directory: the disks of the nodes are below it."""

    def disk(self, node: int) -> Path:
        """Return a node's disk."""
        path = self.disks / f"node-{node}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, command: list[str]) -> "subprocess.Popen[str]":
        """Start what reads from the storage."""
        return subprocess.Popen(command, env=self.storage.environment, stdout=subprocess.PIPE, text=True)


def make_bench(options: Options, source: Path, disks: Path) -> Bench:
    """Make the data set, the same every time, its archive, and the storage."""
    files, tar = source / "storage" / "files", source / "storage" / "files.tar"
    random = np.random.default_rng(0)
    pictures = [photo(seed) for seed in range(_PICTURES)]
    for number in range(options.files):
        path = files / f"class-{number % _CLASSES:03d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A comment makes each file different.
        comment = random.bytes(min(_COMMENT_BYTES, max(16, int(random.normal(10_000, 2_000)))))
        jpeg = pictures[number % _PICTURES]
        path.write_bytes(jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:])
    subprocess.run(["tar", "-c", "-f", tar, "-C", files, "."], check=True)
    needed, free = max(options.nodes) * _COPIES * tar.stat().st_size + _SPARE_BYTES, shutil.disk_usage(disks).free
    if needed > free:
        sys.exit(f"{disks} has room for {free // MB} MB and needs {needed // MB} MB: use --disks, or fewer --files")
    return Bench(storage=Storage(source / "storage", source), files=files, tar=tar, disks=disks)


# --- the ways ---

Method = Callable[[Bench, int], tuple[float, float]]
"""Has so many nodes get the data, and returns the seconds until the last one has them, and those of CPU of all."""


def by_hand(commands: Callable[[Bench, Path], list[list[str]]]) -> Method:
    """Return the way in which every node runs these commands, one after the other."""

    def measured(bench: Bench, nodes: int) -> tuple[float, float]:
        def one(node: int) -> None:
            for command in commands(bench, bench.disk(node)):
                process = bench.start(command)
                process.communicate()
                if process.returncode:
                    sys.exit(f"{command} failed")

        began, began_cpu = time.monotonic(), children_cpu()
        with ThreadPoolExecutor(nodes) as pool:
            list(pool.map(one, range(nodes)))
        return time.monotonic() - began, children_cpu() - began_cpu

    return measured


def children_cpu() -> float:
    """Return the seconds of CPU of the processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(bench: Bench, nodes: int, *, tar: bool) -> tuple[float, float]:
    """Stage with agents that are running and know each other, as they do when a job stages."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    common = [sys.executable, str(NODE), f"--nodes={nodes}", f"--port={port}", f"--run={bench.disks / 'run'}"]
    common += [f"--source={bench.tar if tar else bench.files}"]
    with ExitStack() as held:
        started = [
            held.enter_context(bench.start([*common, f"--rank={rank}", f"--stage-dir={bench.disk(rank)}"]))
            for rank in range(nodes)
        ]
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    if any(answer["fallback"] or answer["in_place"] for answer in told):
        say(f"staging fell back: {told}")
    return max(answer["ended"] for answer in told) - told[0]["began"], sum(answer["cpu"] for answer in told)


METHODS: dict[str, Method] = {
    OURS: partial(ours, tar=False),
    "cp -r": by_hand(lambda bench, disk: [["cp", "-r", str(bench.files), f"{disk}/data"]]),
    "rsync -a": by_hand(lambda bench, disk: [["rsync", "-a", f"{bench.files}/", f"{disk}/data/"]]),
    f"{OURS}, tar": partial(ours, tar=True),
    "cp, tar x": by_hand(
        lambda bench, disk: [
            ["cp", str(bench.tar), f"{disk}/files.tar"], ["tar", "-x", "-f", f"{disk}/files.tar", "-C", str(disk)]
        ]
    ),
}  # fmt: skip


# --- the measurements ---


def stage(bench: Bench, speed: Speed, nodes: int, method: Method) -> list[Sample]:
    """Measure one way once, on empty disks."""
    warm(bench, nodes)
    bench.storage.reset(speed)
    seconds, cpu_seconds = method(bench, nodes)
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "bytes_read": bench.storage.bytes}
    wanted = sorted((path.name, path.stat().st_size) for path in bench.files.rglob("*.jpg"))
    for node in range(nodes):
        if sorted((path.name, path.stat().st_size) for path in bench.disk(node).rglob("*.jpg")) != wanted:
            sys.exit(f"node {node} has not got what it should have")
    for path in bench.disks.iterdir():
        shutil.rmtree(path)
    return [found]


def warm(bench: Bench, nodes: int) -> None:
    """Have the kernel read what it has forgotten, and have as much memory at hand as will be filled.

    A virtual machine may give memory that it does not use back to its host; to get it again takes longer than copying.
    """
    subprocess.run(["tar", "-c", "-f", "-", "-C", bench.tar.parent, "."], check=True, stdout=subprocess.DEVNULL)
    if is_memory(bench.disks):
        filler = bench.disks / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nodes * _COPIES * bench.tar.stat().st_size)
        filler.unlink()


def measure(options: Options) -> Findings:
    """Let the ways take turns."""
    if not shutil.which("rsync"):
        sys.exit("rsync is not there to compare with: install it")
    slow = Speed(name="throttled", rate=options.rate * MB, open_seconds=options.open_ms / 1000)
    cases = {
        f"{speed.name} {nodes} {name}": (speed, nodes, name)
        for speed in (slow, Speed(name="unthrottled"))
        for nodes in options.nodes
        for name in METHODS
    }
    with (
        tempfile.TemporaryDirectory(dir=options.source, prefix="staging-source-") as source,
        tempfile.TemporaryDirectory(dir=options.disks, prefix="staging-disks-") as disks,
    ):
        bench = make_bench(options, Path(source).resolve(), Path(disks).resolve())
        contenders = [
            Contender(name=case, turn=partial(stage, bench, speed, nodes, METHODS[name]))
            for case, (speed, nodes, name) in cases.items()
        ]
        found = take_turns(contenders, options.turns)
        size = bench.tar.stat().st_size
    rows = list[Row]()
    for case, (speed, nodes, name) in cases.items():
        ones = found[case]
        seconds = [one["seconds"] for one in ones]
        ratios = [
            mine / one["seconds"] for mine, one in zip(seconds, found[f"{speed.name} {nodes} {OURS}"], strict=True)
        ]
        rows.append({
            "storage": speed.name, "nodes": nodes, "method": name, "seconds": round(median(seconds), 2),
            **spread(seconds), "cpu_seconds": round(median(one["cpu_seconds"] for one in ones), 2),
            "bytes_read": round(median(one["bytes_read"] for one in ones)), "times_ours": round(median(ratios), 2),
        })  # fmt: skip
    return Findings(tables={"rows": rows}, more={"tar_bytes": size})


if __name__ == "__main__":
    benchmark("staging", Options(), measure, small={"files": 200, "nodes": (1, 2), "turns": 1}, packages=("numpy",))
