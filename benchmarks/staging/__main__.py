"""Staging against what people do by hand: wall time to every node's disk, and bytes read from shared storage.

    .venv/bin/python -m benchmarks.staging
    .venv/bin/python -m benchmarks.staging --sbcast      (as root, with the testbed up: Slurm's own fan-out, too)

Makes 10,000 different JPEG files of about 110 KB, and a tar of them. Then 1, 2 and 4 nodes get them: by ours
(`torchrelay`: the files; `torchrelay, tar`: the archive, unpacked), and by each node for itself, all at once, with
`cp -r`, `rsync -a`, and `cp` of the archive with `tar x`. A node is a directory of its own, by default in memory: the
nodes have a disk each, this machine has one for all. Ours are the processes that run in a job, which wait for the
start; the others' start counts. The ways take turns, so that a machine which slows down does so for all of them.

Shared storage is the source seen through throttle.c: one token bucket for the readers of all nodes, and each opening
of a file takes longer; `unthrottled` without either. In both cases the kernel has all files in memory (they are read
before each measurement): the storage is what the throttle says, not this machine's disk, which would be read once for
all nodes anyway. All that is read from it is counted there, for all alike.

Prints a table and writes every measurement with the hardware as JSON. The CPU time is that of all nodes together, which
share this machine's cores here, and have their own in a cluster.
"""

import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import record
from benchmarks.staging.methods import METHODS, OURS, SBCAST, Bench, Method, allocate
from benchmarks.staging.throttle import MB, Speed, Storage
from hpc.core.files import write_json
from hpc.slurm.client import running_slurm_conf
from hpc.staging.store import is_memory

_RESULTS = record.RESULTS / "staging.json"
_CLASSES, _PICTURES = 100, 16
# A comment in a JPEG file is at most so long.
_COMMENT_BYTES = 65_000
# On a node: the archive, and what is unpacked of it.
_COPIES, _SPARE_BYTES = 2, 1_000 * MB


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    files: int = 10_000
    file_kb: int = 110
    """Mean size of a file, in kB."""
    nodes: tuple[int, ...] = (1, 2, 4)
    rate: float = 200.0
    """Of the throttled storage, in MB/s for all readers together."""
    open_ms: float = 1.0
    """How much longer each opening of a file takes on it, in ms."""
    repeats: int = 3
    only: tuple[str, ...] = ()
    """Only these ways (ours in any case); by default all."""
    storage: tuple[str, ...] = ("throttled", "unthrottled")
    source: Path = Path("/var/tmp")  # noqa: S108 - a new directory in it
    """Where to make the files, in a directory that is removed afterwards."""
    disks: Path = Path("/dev/shm")  # noqa: S108 - a new directory in it
    """Where the nodes' disks are, likewise."""
    sbcast: bool = False
    """Also through Slurm, on the nodes of the running testbed (their /tmp is in memory)."""
    results: Path = _RESULTS


# --- the files ---


def picture(random: np.random.Generator, size: int) -> bytes:
    """A JPEG file of about so many bytes, or one of low quality that is larger."""
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
    noise = random.normal(0, 12, (375, 500, 3))
    image = Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8))
    for quality in range(95, 4, -5):
        file = io.BytesIO()
        image.save(file, "jpeg", quality=quality)
        if file.tell() <= size:
            break
    return file.getvalue()


def padded(jpeg: bytes, comment: bytes) -> bytes:
    """The same picture with comments in its file, which makes it different and longer."""
    parts = [comment[at : at + _COMMENT_BYTES] for at in range(0, len(comment), _COMMENT_BYTES)]
    segments = (b"\xff\xfe" + (len(part) + 2).to_bytes(2, "big") + part for part in parts)
    return b"".join((jpeg[:2], *segments, jpeg[2:]))


def make_files(options: Options, path: Path) -> None:
    """The data set, the same every time."""
    random = np.random.default_rng(0)
    size = options.file_kb * 1000
    pictures = [picture(random, size * 2 // 3) for _ in range(_PICTURES)]
    for number in track(range(options.files), "making files", console=Console(stderr=True), transient=True):
        jpeg = pictures[number % _PICTURES]
        comment = random.bytes(max(16, int(random.normal(size - len(jpeg), size / 20))))
        directory = path / f"class-{number % _CLASSES:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:06d}.jpg").write_bytes(padded(jpeg, comment))


def make_bench(options: Options, source: Path, disks: Path) -> Bench:
    """Files, archive, storage."""
    files, tar = source / "storage" / "files", source / "storage" / "files.tar"
    make_files(options, files)
    subprocess.run(["tar", "-c", "-f", tar, "-C", files, "."], check=True)
    needed, free = max(options.nodes) * _COPIES * tar.stat().st_size + _SPARE_BYTES, shutil.disk_usage(disks).free
    if is_memory(disks):
        free = min(free, int(_proc("meminfo", "MemAvailable").split()[0]) * 1024)
    if needed > free:
        sys.exit(f"{disks} has room for {free // MB} MB and needs {needed // MB} MB: use --disks, or fewer --files")
    allocations = {nodes: allocate(nodes) for nodes in options.nodes} if options.sbcast else {}
    storage = Storage(source / "storage", source)
    return Bench(storage=storage, files=files, tar=tar, disks=disks, allocations=allocations)


def _proc(file: str, field: str) -> str:
    fields = (line.partition(":") for line in (Path("/proc") / file).read_text().splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")


# --- the measurements ---


def measure(bench: Bench, speed: Speed, nodes: int, name: str, method: Method) -> dict[str, Any]:
    """One way once, on empty disks."""
    warm(bench, nodes)
    bench.storage.reset(speed)
    cost = method(bench, nodes)
    found = {
        "storage": speed.name, "nodes": nodes, "method": name, **cost._asdict(),
        "bytes_read": bench.storage.bytes, "opens": bench.storage.opens, "load": os.getloadavg()[0],
    }  # fmt: skip
    check(bench, nodes if name not in SBCAST else 0)
    for path in bench.disks.iterdir():
        shutil.rmtree(path)
    return found


def warm(bench: Bench, nodes: int) -> None:
    """Have the kernel read what it has forgotten, and have as much memory at hand as will be filled.

    A virtual machine may give memory that it does not use back to its host; to get it again takes longer than copying.
    """
    subprocess.run(["tar", "-c", "-f", "-", "-C", bench.tar.parent, "."], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["dd", f"if={bench.tar}", "of=/dev/null", "bs=1M", "status=none"], check=True)
    if is_memory(bench.disks):
        filler = bench.disks / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nodes * _COPIES * bench.tar.stat().st_size)
        filler.unlink()


def check(bench: Bench, nodes: int) -> None:
    """Every node has every file."""
    wanted = sorted((path.name, path.stat().st_size) for path in bench.files.rglob("*.jpg"))
    for node in range(nodes):
        if sorted((path.name, path.stat().st_size) for path in bench.disk(node).rglob("*.jpg")) != wanted:
            sys.exit(f"node {node} has not got what it should have")


def measure_all(options: Options, bench: Bench, methods: dict[str, Method]) -> list[dict[str, Any]]:
    """All ways, in turn; each round begins with another one."""
    found = []
    names = list(methods)
    for repeat in range(options.repeats):
        turn = names[repeat % len(names) :] + names[: repeat % len(names)]
        for nodes in options.nodes:
            for speed in speeds(options):
                for name in turn:
                    found.append({"repeat": repeat, **measure(bench, speed, nodes, name, methods[name])})
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def speeds(options: Options) -> list[Speed]:
    """The storage, slow and not."""
    slow = Speed(name="throttled", rate=options.rate * MB, open_seconds=options.open_ms / 1000)
    return [speed for speed in (slow, Speed(name="unthrottled")) if speed.name in options.storage]


def check_throttle(options: Options, bench: Bench) -> dict[int, float]:
    """Megabytes per second that one reader and four together get of the throttled storage."""
    speed = next((speed for speed in speeds(options) if speed.rate), None)
    if speed is None:
        return {}
    return {readers: bench.storage.measured_rate(speed, bench.tar, readers) / MB for readers in (1, 4)}


# --- what it says ---


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way: the median of its times, and of its times relative to ours of the same round."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault((one["storage"], one["nodes"], one["method"]), []).append(one)
    rows = []
    for (storage, nodes, method), ones in sorted(groups.items(), key=lambda group: group[0][:2]):
        ours = {one["repeat"]: one["seconds"] for one in groups[storage, nodes, OURS]}
        rows.append({
            "storage": storage, "nodes": nodes, "method": method,
            "seconds": statistics.median(one["seconds"] for one in ones),
            "least": min(one["seconds"] for one in ones), "most": max(one["seconds"] for one in ones),
            "cpu_seconds": statistics.median(one["cpu_seconds"] for one in ones),
            "bytes_read": round(statistics.median(one["bytes_read"] for one in ones)),
            "times_ours": statistics.median(one["seconds"] / ours[one["repeat"]] for one in ones),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("storage", "nodes", "how"):
        drawn.add_column(title, no_wrap=True)
    for title in ("seconds", "least", "most", "CPU, s", "GB read", "times ours"):
        drawn.add_column(title, justify="right")
    for row in rows:
        times = [f"{row[key]:.2f}" for key in ("seconds", "least", "most", "cpu_seconds")]
        cells = (*times, f"{row['bytes_read'] / 1e9:.2f}", f"{row['times_ours']:.2f}")
        drawn.add_row(row["storage"], str(row["nodes"]), row["method"], *cells)
    return drawn


def hardware(options: Options) -> dict[str, Any]:
    """Where it was measured."""
    versions = {name: _first_line([name, "--version"]) for name in ("cp", "tar", "rsync") if shutil.which(name)}
    return {**record.machine(()), **versions, "source": str(options.source), "disks": str(options.disks)}


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main(options: Options) -> None:
    """Make, measure, print, write."""
    known = {**METHODS, **(SBCAST if options.sbcast else {})}
    unknown = set(options.only) - known.keys()
    if unknown:
        sys.exit(f"--only {', '.join(unknown)} is unknown: it is one of {', '.join(known)}")
    methods = {name: known[name] for name in known if name == OURS or not options.only or name in options.only}
    if not shutil.which("rsync") and "rsync -a" in methods:
        sys.exit("rsync is not there to compare with: install it, or leave it out with --only")
    if options.sbcast and "SLURM_CONF" not in os.environ:
        os.environ["SLURM_CONF"] = str(running_slurm_conf() or sys.exit("no testbed is up: hpc testbed up --nodes 4"))
    # What was made is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with (
        tempfile.TemporaryDirectory(dir=options.source, prefix="staging-source-") as source,
        tempfile.TemporaryDirectory(dir=options.disks, prefix="staging-disks-") as disks,
    ):
        bench = make_bench(options, Path(source).resolve(), Path(disks).resolve())
        try:
            throttle = check_throttle(options, bench)
            found = measure_all(options, bench, methods)
        finally:
            for job in bench.allocations.values():
                subprocess.run(["scancel", job], check=False)
        size = bench.tar.stat().st_size
    rows = summary(found)
    settings = {key: value for key, value in asdict(options).items() if not isinstance(value, Path)}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    measured = {"throttle_mb_per_second": throttle, "tar_bytes": size, "summary": rows, "measurements": found}
    write_json(options.results, {"machine": hardware(options), "options": settings, **measured})
    print(f"{options.files} files, {size / 1e9:.2f} GB; the throttle gives {throttle} MB/s to so many readers\n")
    Console().print(table(rows))


if __name__ == "__main__":
    main(tyro.cli(Options))
