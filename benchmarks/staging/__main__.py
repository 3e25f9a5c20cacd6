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
all nodes anyway. The bytes that are read from it are counted there, for all alike.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Findings, Flags, Row, Sample, benchmark, say, spread, take_turns
from benchmarks.photos import photo
from benchmarks.staging.throttle import MB, Speed, Storage
from hpc.base.transport import pick_port
from jobs.staging.store import is_memory

NODE = Path(__file__).with_name("node.py")
OURS = "torchrelay"
BY_HAND = {
    "cp -r": "cp -r {files} {disk}/data",
    "rsync -a": "rsync -a {files}/ {disk}/data/",
    "cp, tar x": "cp {tar} {disk}/files.tar && tar -x -f {disk}/files.tar -C {disk}",
}
METHODS = (OURS, "cp -r", "rsync -a", f"{OURS}, tar", "cp, tar x")
_CLASSES, _PICTURES = 100, 16
# The comment that makes each file different.
_COMMENT_BYTES = 10_000
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
    random, pictures = np.random.default_rng(0), [photo(seed) for seed in range(_PICTURES)]
    for number in range(options.files):
        path = files / f"class-{number % _CLASSES:03d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        comment = b"\xff\xfe" + (_COMMENT_BYTES + 2).to_bytes(2, "big") + random.bytes(_COMMENT_BYTES)
        jpeg = pictures[number % _PICTURES]
        path.write_bytes(jpeg[:2] + comment + jpeg[2:])
    subprocess.run(["tar", "-c", "-f", tar, "-C", files, "."], check=True)
    needed, free = max(options.nodes) * _COPIES * tar.stat().st_size + _SPARE_BYTES, shutil.disk_usage(disks).free
    if needed > free:
        sys.exit(f"{disks} has room for {free // MB} MB and needs {needed // MB} MB: use --disks, or fewer --files")
    return Bench(storage=Storage(source / "storage", source), files=files, tar=tar, disks=disks)


def by_hand(bench: Bench, nodes: int, command: str) -> float:
    """Have all nodes run a command of the shell at once, and return the seconds until the last one has ended."""
    began = time.monotonic()
    started = [
        bench.start(["sh", "-c", command.format(files=bench.files, tar=bench.tar, disk=bench.disk(node))])
        for node in range(nodes)
    ]
    for process in started:
        process.communicate()
    if any(process.returncode for process in started):
        sys.exit(f"{command} failed")
    return time.monotonic() - began


def ours(bench: Bench, nodes: int, source: Path) -> float:
    """Stage with agents that are running and know each other, as they do when a job stages; return the seconds."""
    common = [sys.executable, str(NODE), f"--nodes={nodes}", f"--port={pick_port()}", f"--run={bench.disks / 'run'}"]
    with ExitStack() as held:
        started = [
            held.enter_context(
                bench.start([*common, f"--source={source}", f"--rank={rank}", f"--stage-dir={bench.disk(rank)}"])
            )
            for rank in range(nodes)
        ]
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    if any(answer["fallback"] or answer["in_place"] for answer in told):
        say(f"staging fell back: {told}")
    return max(float(answer["ended"]) for answer in told) - float(told[0]["began"])


def stage(bench: Bench, speed: Speed, nodes: int, method: str) -> list[Sample]:
    """Measure one way once, on empty disks."""
    warm(bench, nodes)
    bench.storage.reset(speed)
    if method in BY_HAND:
        seconds = by_hand(bench, nodes, BY_HAND[method])
    else:
        seconds = ours(bench, nodes, bench.files if method == OURS else bench.tar)
    found = {"seconds": seconds, "bytes_read": bench.storage.bytes}
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
        contenders = {case: partial(stage, bench, *words) for case, words in cases.items()}
        found = take_turns(contenders, options.turns)
        size = bench.tar.stat().st_size
    rows: list[Row] = [
        {
            "storage": speed.name, "nodes": nodes, "method": name,
            "seconds": round(median(one["seconds"] for one in found[case]), 2),
            **spread([one["seconds"] for one in found[case]]),
            "bytes_read": round(median(one["bytes_read"] for one in found[case])),
        }
        for case, (speed, nodes, name) in cases.items()
    ]  # fmt: skip
    return Findings(tables={"rows": rows}, more={"tar_bytes": size})


if __name__ == "__main__":
    benchmark("staging", Options, measure, small={"files": 200, "nodes": (1, 2), "turns": 1}, packages=("numpy",))
