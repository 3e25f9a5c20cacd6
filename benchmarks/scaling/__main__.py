"""Images per second on 1, 2 and 4 nodes of the testbed, against what their cores and links can do at most. As root.

    .venv/bin/python -m benchmarks.scaling
    .venv/bin/python -m benchmarks.scaling --small

ResNet-18 at 32 px on generated images, one rank per node: ours with default flags, with bf16 compression, and with
accumulation; a hand-written loop with DistributedDataParallel, with and without compression. Links carry what the
machine can, 1 Gbit/s, or 200 Mbit/s. Each node has the same share of a core, however many there are (`node_limits.py`).

Trainings start once, as many as the memory holds. Then they take turns, one at a time, while the others are stopped:
window by window, each with each link, so that a machine which slows down does so for all. A window counts whole steps.

The bound of a step is what it would take if communication cost no CPU time:
  - compute: the step of nodes that train alone, as many of them at the same time. Accumulation multiplies it;
  - wire: a ring sends 2 (n - 1) / n times the gradients of each node, at the rate of its link less the headers;
  - perfect overlap: the longer of the two. No overlap: their sum.
Here the all-reduce (copies, sums, TCP) and the training share the core; on GPUs it would take none of it. Prints the
table, writes benchmarks/results/scaling.json.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks import record
from benchmarks.record import ROOT
from benchmarks.scaling.node_limits import CpuQuotas, shape_links
from hpc.core.events import ledger
from hpc.core.files import read_json_lines
from hpc.core.rundir import RunDir
from hpc.testbed import lifecycle
from hpc.testbed.layout import TestbedNode, TestbedShape
from hpc.testbed.nodes import processes

LOOP = Path(__file__).with_name("ddp_loop.py")
_PATIENCE_SECONDS = 300.0
# Of trainings that take turns: each, with its torchrun, needs about 0.8 GB.
_MOST_RANKS = 12
# Of an Ethernet frame, 1448 of 1514 bytes are payload; tbf counts all of them.
_PAYLOAD = 1448 / 1514
RATES = {"none": None, "1gbit": 1e9, "200mbit": 200e6, "100mbit": 100e6}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure scaling."""

    nodes: tuple[int, ...] = (1, 2, 4)
    """Sizes."""
    links: tuple[str, ...] = ("none", "1gbit", "200mbit")
    """Rates of the links; none: not shaped."""
    share: float = 0.4
    """Of a core for each node; 0: no quota."""
    batch_size: int = 64
    """Images per rank, and of each part of an accumulated step."""
    accumulate: int = 4
    """Parts of an accumulated step."""
    repeats: int = 3
    """Windows of each training with each link."""
    seconds: float = 3.0
    """The shortest window."""
    steps: int = 2
    """The fewest steps of a window."""
    small: bool = False
    """1 and 2 nodes, 200mbit, one window, two trainings: to try the script."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train."""

    name: str
    ours: bool = True
    bf16: bool = False
    accumulate: int = 1


def variants(options: Options, nodes: int) -> list[Variant]:
    """Those to compare; on one node nothing is sent, so compression changes nothing."""
    found = [
        Variant(name="ours"),
        Variant(name="hand-written loop", ours=False),
        Variant(name="ours, --compress-gradients bf16", bf16=True),
        Variant(name="hand-written loop, bf16", ours=False, bf16=True),
        Variant(name=f"ours, --grad-accum-steps {options.accumulate}", accumulate=options.accumulate),
    ]
    return found[:2] if options.small or nodes == 1 else found


# --- jobs ---


@dataclass(kw_only=True)
class Training:
    """A job that trains; `log` has a line with the time of each step."""

    job: str
    nodes: Sequence[str]
    log: Path
    run: Path | None
    """None: not of ours."""
    images: int
    """Per step, of all ranks."""

    def steps_since(self, began: float) -> list[float]:
        """When steps ended since then."""
        lines = list(read_json_lines(self.log)) if self.log.exists() else []
        return [line["time"] for line in lines if line["time"] > began]

    def output(self) -> str:
        """The end of what it has printed, and what squeue says of it."""
        logs = [Path(f"{self.log}.out")] if self.run is None else sorted((self.run / "logs").rglob("*"))
        texts = [f"{log}:\n{log.read_text()[-2000:]}" for log in logs if log.is_file()]
        queue = subprocess.run(["squeue", f"--jobs={self.job}"], capture_output=True, text=True, check=False)
        return "\n".join([*texts, queue.stdout + queue.stderr])

    def signal(self, number: signal.Signals) -> None:
        """Stop or continue all of its processes, on all nodes."""
        mark = f"SLURM_JOB_ID={self.job}".encode()
        for node in self.nodes:
            for pid in processes(lifecycle.PATHS.node_net(node)):
                # One may end meanwhile.
                with suppress(FileNotFoundError, ProcessLookupError):
                    if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, number)

    def cancel(self) -> "subprocess.Popen[bytes]":
        """End it for good."""
        command = ["scancel", self.job] if self.run is None else _hpc("cancel", str(self.run))
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _hpc(*words: str) -> list[str]:
    return [sys.executable, "-m", "hpc", *words]


def submit(variant: Variant, nodes: Sequence[str], directory: Path, options: Options) -> Training:
    """Submit a training on these nodes."""
    name = f"{variant.name.translate(str.maketrans(' ,', '--'))}-{'-'.join(nodes)}"
    images = options.batch_size * variant.accumulate * len(nodes)
    if not variant.ours:
        log = directory / f"{name}.jsonl"
        return Training(job=_submit_loop(variant, nodes, log, options), nodes=nodes, log=log, run=None, images=images)
    command = _hpc(
        "submit", "--json", f"--name={name}", f"--runs-dir={directory}", f"--nodes={len(nodes)}",
        "--gpus-per-node=1", "--cpus-per-gpu=1", "--mem=2G", "--time=2h", f"--sbatch=nodelist={','.join(nodes)}",
        "--synthetic", "--model=resnet18", "--image-size=32", f"--batch-size={images}", "--epochs=100000",
        "--lr=0.01", "--lr-scheduler=constant", "--num-workers=0", "--log-every=1",
        # Of the scaling alone: `recovery.py` and `snapshots.py` are about the rest. A step takes longer on a slow
        # link than the steps before, which is no hang.
        "--checkpoint-every=2h", "--snapshot-every=off", "--hang-timeout=1h",
        f"--grad-accum-steps={variant.accumulate}", f"--compress-gradients={'bf16' if variant.bf16 else 'none'}",
    )  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    run = directory / name
    [job] = [event["job_id"] for event in ledger.read(RunDir(run).events) if event["event"] == "submitted"]
    return Training(job=job, nodes=nodes, log=RunDir(run).train_metrics, run=run, images=images)


def _submit_loop(variant: Variant, nodes: Sequence[str], log: Path, options: Options) -> str:
    torchrun = (
        f"{Path(sys.executable).parent}/torchrun --nnodes={len(nodes)} --nproc-per-node=1 --node-rank=$SLURM_NODEID "
        f"--master-addr={nodes[0]} --master-port={29_500 + variant.bf16} {LOOP} --batch-size={options.batch_size} "
        f"--image-size=32 --steps-file={log} {'--bf16' if variant.bf16 else ''}"
    )
    done = subprocess.run(
        ["sbatch", "--parsable", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=1",
         "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G", "--time=2:00:00", f"--output={log}.out",
         f"--wrap=srun --cpus-per-task=1 bash -c 'OMP_NUM_THREADS=1 {torchrun}'"],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def wait_for_steps(trainings: Sequence[Training], began: float, are_enough: Callable[[list[float]], bool]) -> None:
    """Until each training has made enough steps since then."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not all(are_enough(training.steps_since(began)) for training in trainings):
        if time.monotonic() > end:
            raise TimeoutError(
                f"no steps in {_PATIENCE_SECONDS:.0f} s:\n" + "\n".join(one.output() for one in trainings)
            )
        time.sleep(0.1)


@contextmanager
def started(submitted: Iterable[Training]) -> Iterator[list[Training]]:
    """Wait until a training trains and stop it, one after the other as they are submitted; cancel them at the end."""
    began, trainings = time.time(), list[Training]()
    for training in submitted:
        wait_for_steps([training], time.time(), lambda times: len(times) >= 2)
        training.signal(signal.SIGSTOP)
        trainings.append(training)
    print(f"{len(trainings)} trainings started in {time.time() - began:.0f} s", file=sys.stderr)
    yield trainings
    for training in trainings:
        training.signal(signal.SIGCONT)
    for ending in [training.cancel() for training in trainings]:
        ending.wait()


def window(trainings: Sequence[Training], options: Options) -> list[float]:
    """Let these train at the same time for a while, and nothing else; the seconds of a step of each."""
    began = time.time()
    for training in trainings:
        training.signal(signal.SIGCONT)
    # A step that was suspended does not count: time runs from its end.
    wait_for_steps(
        trainings, began,
        lambda times: len(times) > options.steps and times[-1] - times[0] >= options.seconds,
    )  # fmt: skip
    for training in trainings:
        training.signal(signal.SIGSTOP)
    found = [training.steps_since(began) for training in trainings]
    return [(times[-1] - times[0]) / (len(times) - 1) for times in found]


# --- what is measured, and the bound ---


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training with one link: medians of its windows."""

    nodes: int
    link: str
    training: str
    images_per_second: float
    spread: str
    """The slowest and the fastest window."""
    step_seconds: float
    compute_seconds: float
    wire_seconds: float
    of_perfect_overlap: float
    """The bound over the measured step."""
    of_no_overlap: float
    efficiency: float
    """Images per second of a node over those of our training on one node."""


def wire_seconds(nodes: int, gradient_bytes: int, bits_per_second: float | None) -> float:
    """How long a ring all-reduce takes on links of this rate, at least; 0 if they are not limited.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    if bits_per_second is None:
        return 0.0
    return 2 * (nodes - 1) / nodes * gradient_bytes * 8 / (bits_per_second * _PAYLOAD)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What limits a step on so many nodes."""

    nodes: int
    compute: float
    """Seconds of a step that is not accumulated, without communication."""
    gradient_bytes: int
    one_node: float
    """Images per second of our training on one node."""

    def row(self, link: str, variant: Variant, images: int, steps: Sequence[float]) -> Row:
        """What the windows of a training say."""
        step, computing = median(steps), self.compute * variant.accumulate
        wire = wire_seconds(self.nodes, self.gradient_bytes // (1 + variant.bf16), RATES[link])
        speeds = sorted(images / seconds for seconds in steps)
        return Row(
            nodes=self.nodes, link=link, training=variant.name, images_per_second=round(images / step, 1),
            spread=f"{speeds[0]:.1f} to {speeds[-1]:.1f}", step_seconds=round(step, 3),
            compute_seconds=round(computing, 3), wire_seconds=round(wire, 3),
            of_perfect_overlap=round(max(computing, wire) / step, 3), of_no_overlap=round((computing + wire) / step, 3),
            efficiency=round(images / step / self.nodes / self.one_node, 3),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The testbed's nodes, and the trainings that have a node for themselves."""

    options: Options
    nodes: Sequence[TestbedNode]
    quotas: CpuQuotas | None
    alone: Sequence[Training]
    gradient_bytes: int
    directory: Path

    def limit(self, share: float) -> None:
        """Set all nodes' shares of a core; 0: no limit."""
        if self.quotas is not None:
            self.quotas.set(share or None)

    def compute_seconds(self, nodes: int) -> float:
        """A step without communication, of so many nodes at the same time."""
        return median(window(self.alone[:nodes], self.options))

    def rows(self, count: int, one_node: float | None) -> list[Row]:
        """All trainings on so many nodes, with all links. `one_node`: as of `Bound`; None: measured now."""
        wanted = variants(self.options, count)
        computes, steps = list[float](), dict[tuple[str, Variant], list[float]]()
        most = max(1, _MOST_RANKS // count)
        for begin in range(0, len(wanted), most):
            self._take_turns(wanted[begin : begin + most], count, computes, steps)
        first = self.images(wanted[0], count) / median(next(iter(steps.values()))) / count
        bound = Bound(
            nodes=count, compute=median(computes), gradient_bytes=self.gradient_bytes, one_node=one_node or first
        )
        return [
            bound.row(link, variant, self.images(variant, count), steps[link, variant])
            for link in dict.fromkeys(link for link, _ in steps)
            for variant in wanted
        ]

    def images(self, variant: Variant, nodes: int) -> int:
        """Per step of all ranks."""
        return self.options.batch_size * variant.accumulate * nodes

    def _take_turns(
        self, group: Sequence[Variant], count: int, computes: list[float], steps: dict[tuple[str, Variant], list[float]]
    ) -> None:
        """Start these trainings, and add what their windows say."""
        options, names = self.options, [node.name for node in self.nodes[:count]]
        # Processes start without limits: imports are not what is measured.
        self.limit(0)
        shape_links(self.nodes, None)
        with started(submit(variant, names, self.directory, options) for variant in group) as trainings:
            self.limit(options.share)
            for turn in range(options.repeats):
                computes.append(self.compute_seconds(count))
                for link in options.links if count > 1 else ("none",):
                    shape_links(self.nodes, None if link == "none" else link)
                    for variant, training in zip(group, trainings, strict=True):
                        steps.setdefault((link, variant), []).extend(window([training], options))
                print(f"{count} nodes: turn {turn + 1} of {options.repeats}", file=sys.stderr)
            self.limit(0)
            shape_links(self.nodes, None)


def measure(options: Options, directory: Path) -> tuple[list[Row], int]:
    """All sizes, on a new testbed. Also returns the bytes of the gradients."""
    most = max(options.nodes)
    lifecycle.up(TestbedShape(nodes=most, gpus_per_node=8, cpus_per_node=16))
    os.environ["SLURM_CONF"] = str(lifecycle.PATHS.slurm_conf)
    nodes = lifecycle.status().nodes
    quotas = None
    try:
        quotas = CpuQuotas(nodes) if options.share else None
        lone = Variant(name="alone")
        with started(submit(lone, [node.name], directory, options) for node in nodes) as alone:
            run = alone[0].run
            assert run is not None  # noqa: S101 - ours
            [size] = [event["gradient_bytes"] for event in ledger.read(RunDir(run).events)
                      if event["event"] == "train_started"]  # fmt: skip
            bench = Bench(options=options, nodes=nodes, quotas=quotas, alone=alone, gradient_bytes=size,
                          directory=directory)  # fmt: skip
            rows, one_node = list[Row](), None
            for count in sorted(options.nodes):
                rows += bench.rows(count, one_node)
                print(record.table([asdict(row) for row in rows]), file=sys.stderr, flush=True)
                one_node = one_node or rows[0].images_per_second
    finally:
        lifecycle.down()
        if quotas is not None:
            quotas.remove()
    return rows, size


def main() -> None:
    """Measure, print, write."""
    options = tyro.cli(Options, description=__doc__)
    if options.small:
        options = replace(options, nodes=(1, 2), links=("200mbit",), repeats=1)
    if unknown := set(options.links) - RATES.keys():
        raise SystemExit(f"--links {' '.join(sorted(unknown))}: use {' '.join(RATES)}")
    if options.share * max(options.nodes) > len(os.sched_getaffinity(0)):
        raise SystemExit(f"--share {options.share}: {max(options.nodes)} nodes want more cores than there are")
    measured_on, began = record.machine(), time.monotonic()
    # Not in /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-scaling-") as directory:
        rows, size = measure(options, Path(directory))
    print(record.table([asdict(row) for row in rows]))
    print(f"{size / 1e6:.1f} MB of gradients; {time.monotonic() - began:.0f} s", file=sys.stderr)
    given: dict[str, Any] = asdict(options)
    record.write("scaling", measured_on, [asdict(row) for row in rows], options=given, gradient_bytes=size)


if __name__ == "__main__":
    main()
