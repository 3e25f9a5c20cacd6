"""Images per second on 1, 2 and 4 nodes of the testbed, on links of some rates. As root.

    .venv/bin/python -m benchmarks.scaling

ResNet-18 at 32 px on generated images, one rank per node: ours with default flags, with bf16 compression, and with
accumulation; a hand-written loop with DistributedDataParallel, with and without compression. Links carry what the
machine can, 1 Gbit/s, or 200 Mbit/s. Each node has the same share of a core, however many there are (`node_limits.py`).

Trainings start once, as many as the memory holds. Then they take turns, one at a time, while the others are stopped. A
turn counts whole steps. The efficiency is the images per second of a node over those of our training on one node. The
all-reduce (copies, sums, TCP) and the training share the core here; on GPUs it would take none of it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import Contender, Findings, Flags, Row, Sample, benchmark, take_turns
from benchmarks.hpc_commands import hpc
from benchmarks.scaling.node_limits import CpuQuotas, shape_links
from hpc.base.files import read_json_lines
from hpc.cluster.testbed import lifecycle
from hpc.cluster.testbed.layout import TestbedNode, TestbedShape
from hpc.cluster.testbed.nodes import processes
from hpc.run.rundir import RunDir

LOOP = Path(__file__).with_name("ddp_loop.py")
_PATIENCE_SECONDS = 300.0
# Of trainings that take turns: each, with its torchrun, needs about 0.8 GB.
_MOST_RANKS = 12


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    nodes: tuple[int, ...] = (1, 2, 4)
    """Sizes; the first is what the others are compared with."""
    links: tuple[str, ...] = ("none", "1gbit", "200mbit")
    """Rates of the links, as tc has them; none: not shaped."""
    share: float = 0.4
    """Share of a core for each node; 0: no quota."""
    batch_size: int = 64
    """Images per rank, and of each part of an accumulated step."""
    turns: int = 3
    """Turns of each training with each link."""
    seconds: float = 3.0
    """The shortest turn."""
    variants: int = 5
    """How many ways to train, from the first on."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train."""

    name: str
    ours: bool = True
    bf16: bool = False
    accumulate: int = 1


VARIANTS = (
    Variant(name="ours"),
    Variant(name="hand-written loop", ours=False),
    Variant(name="ours, --compress-gradients bf16", bf16=True),
    Variant(name="hand-written loop, bf16", ours=False, bf16=True),
    Variant(name="ours, --grad-accum-steps 4", accumulate=4),
)


@dataclass(kw_only=True)
class Training:
    """A job that trains."""

    variant: Variant
    job: str
    nodes: Sequence[str]
    log: Path
    """A line with the time of each step."""
    directory: Path
    """What it has printed is below."""

    def steps_since(self, began: float) -> list[float]:
        """Return when steps ended since then."""
        lines = list(read_json_lines(self.log)) if self.log.exists() else []
        return [line["time"] for line in lines if line["time"] > began]

    def wait_for_steps(self, began: float, are_enough: Callable[[list[float]], bool]) -> list[float]:
        """Wait until it has made enough steps since then, and return their times."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not are_enough(times := self.steps_since(began)):
            if time.monotonic() > end:
                texts = (f"{path}:\n{path.read_text()[-2000:]}" for path in self.directory.rglob("*.log"))
                raise TimeoutError(f"{self.variant.name}: no steps in {_PATIENCE_SECONDS:.0f} s\n" + "\n".join(texts))
            time.sleep(0.1)
        return times

    def signal(self, number: signal.Signals) -> None:
        """Stop or continue all of its processes, on all nodes."""
        mark = f"SLURM_JOB_ID={self.job}".encode()
        for node in self.nodes:
            for pid in processes(lifecycle.PATHS.node_net(node)):
                # One may end meanwhile.
                with suppress(FileNotFoundError, ProcessLookupError):
                    if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, number)

    def turn(self, seconds: float) -> list[Sample]:
        """Let it train for a while, and nothing else; return the seconds of a step."""
        began = time.time()
        self.signal(signal.SIGCONT)
        # A step that was suspended does not count: time runs from its end.
        times = self.wait_for_steps(began, lambda times: len(times) > 2 and times[-1] - times[0] >= seconds)
        self.signal(signal.SIGSTOP)
        return [{"seconds": (times[-1] - times[0]) / (len(times) - 1)}]


def submit(variant: Variant, nodes: Sequence[str], directory: Path, batch_size: int) -> Training:
    """Submit a training on these nodes."""
    name = f"{variant.name.translate(str.maketrans(' ,', '--'))}-{'-'.join(nodes)}"
    if variant.ours:
        answer = hpc(
            "submit", f"--name={name}", f"--runs-dir={directory}", f"--nodes={len(nodes)}",
            "--gpus-per-node=1", "--cpus-per-gpu=1", "--mem=2G", "--time=2h", f"--sbatch=nodelist={','.join(nodes)}",
            "--synthetic", "--model=resnet18", "--image-size=32", "--epochs=100000",
            f"--batch-size={batch_size * variant.accumulate * len(nodes)}",
            "--lr=0.01", "--lr-scheduler=constant", "--num-workers=0", "--log-every=1",
            # Nothing but the scaling is measured, and a slow link makes a step longer, which is no hang.
            "--checkpoint-every=2h", "--snapshot-every=off", "--hang-timeout=1h",
            f"--grad-accum-steps={variant.accumulate}", f"--compress-gradients={'bf16' if variant.bf16 else 'none'}",
        )  # fmt: skip
        job, log = answer["job_id"], RunDir(directory / name).train_metrics
    else:
        log = directory / name / "steps.jsonl"
        log.parent.mkdir()
        torchrun = (
            f"{Path(sys.executable).parent}/torchrun --nnodes={len(nodes)} --nproc-per-node=1 "
            f"--node-rank=$SLURM_NODEID --master-addr={nodes[0]} --master-port={29_500 + variant.bf16} {LOOP} "
            f"--batch-size={batch_size} --image-size=32 --steps-file={log} {'--bf16' if variant.bf16 else ''}"
        )
        done = subprocess.run(
            ["sbatch", "--parsable", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=1",
             "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G", "--time=2:00:00", f"--output={log.parent}/job.log",
             f"--wrap=srun --cpus-per-task=1 bash -c 'OMP_NUM_THREADS=1 {torchrun}'"],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        job = done.stdout.strip()
    return Training(variant=variant, job=job, nodes=nodes, log=log, directory=directory / name)


@contextmanager
def started(submitted: Iterable[Training]) -> Iterator[list[Training]]:
    """Wait until a training trains and stop it, one after the other as they are submitted; cancel them at the end."""
    trainings = list[Training]()
    for training in submitted:
        training.wait_for_steps(0.0, lambda times: len(times) >= 2)
        training.signal(signal.SIGSTOP)
        trainings.append(training)
    yield trainings
    for training in trainings:
        training.signal(signal.SIGCONT)
        if training.variant.ours:
            hpc("cancel", str(training.directory))
        else:
            subprocess.run(["scancel", training.job], check=True)


def rows_of(count: int, one_node: float | None, nodes: Sequence[TestbedNode], quotas: CpuQuotas | None,
            options: Options, directory: Path) -> list[Row]:  # fmt: skip
    """Measure all trainings on so many nodes, with all links.

    `one_node`: images per second of our training on one node; None: they are measured now.
    """
    # On one node nothing is sent, so compression changes nothing.
    variants = VARIANTS[: options.variants if count > 1 else 2]
    links = options.links if count > 1 else ("none",)
    found: dict[str, list[Sample]] = {}
    most = max(1, _MOST_RANKS // count)
    for begin in range(0, len(variants), most):
        names = [node.name for node in nodes[:count]]
        group = (submit(each, names, directory, options.batch_size) for each in variants[begin : begin + most])
        with started(group) as trainings, limited(quotas, options.share, nodes):

            def turn(link: str, training: Training) -> list[Sample]:
                shape_links(nodes, None if link == "none" else link)
                return training.turn(options.seconds)

            contenders = [
                Contender(name=f"{link} {each.variant.name}", turn=partial(turn, link, each))
                for link in links
                for each in trainings
            ]
            found |= take_turns(contenders, options.turns)
    rows = list[Row]()
    for link in links:
        for variant in variants:
            steps = [each["seconds"] for each in found[f"{link} {variant.name}"]]
            speeds = sorted(options.batch_size * variant.accumulate * count / seconds for seconds in steps)
            one_node = one_node or median(speeds) / count
            rows.append({
                "nodes": count, "link": link, "training": variant.name, "images_per_second": round(median(speeds), 1),
                "spread": f"{speeds[0]:.1f} to {speeds[-1]:.1f}", "step_seconds": round(median(steps), 3),
                "efficiency": round(median(speeds) / count / one_node, 3),
            })  # fmt: skip
    return rows


@contextmanager
def limited(quotas: CpuQuotas | None, share: float, nodes: Sequence[TestbedNode]) -> Iterator[None]:
    """Limit the nodes while trainings take turns: they start without limits, because imports are not measured."""
    if quotas:
        quotas.set(share)
    try:
        yield
    finally:
        if quotas:
            quotas.set(None)
        shape_links(nodes, None)


def measure(options: Options) -> Findings:
    """Measure all sizes, on a new testbed."""
    if options.share * max(options.nodes) > len(os.sched_getaffinity(0)):
        raise SystemExit(f"--share {options.share}: {max(options.nodes)} nodes want more cores than there are")
    rows, quotas = list[Row](), None
    lifecycle.up(TestbedShape(nodes=max(options.nodes), gpus_per_node=8, cpus_per_node=16))
    os.environ["SLURM_CONF"] = str(lifecycle.PATHS.slurm_conf)
    nodes = lifecycle.status().nodes
    # Not in /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-scaling-") as directory:
        try:
            quotas = CpuQuotas(nodes) if options.share else None
            for count in options.nodes:
                one_node = rows[0]["images_per_second"] / options.nodes[0] if rows else None
                rows += rows_of(count, one_node, nodes, quotas, options, Path(directory))
        finally:
            lifecycle.down()
            if quotas is not None:
                quotas.remove()
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("scaling", Options(), measure, small={"nodes": (1, 2), "links": ("200mbit",), "turns": 1, "variants": 2})
