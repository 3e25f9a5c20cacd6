"""Images per second on 1, 2 and 4 nodes of the testbed, on links of some rates. As root.

    .venv/bin/python -m benchmarks.scaling

ResNet-18 at 32 px, one rank per node: ours with default flags, with bf16 compression, and with accumulation; a
hand-written loop with DistributedDataParallel, with and without compression. Links carry what the machine can, 1
Gbit/s, or 200 Mbit/s. Each node has the same share of a core, however many there are (`node_limits.py`).

Trainings take turns: each starts without limits, because imports are not measured, and then trains for a while on each
link. Whole steps count. The efficiency is the images per second of a node over those of our training on one node. The
all-reduce (copies, sums, TCP) and the training share the core here; on GPUs it would take none of it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, Findings, Flags, Row, Sample, benchmark, take_turns
from benchmarks.hpc_commands import hpc, testbed
from benchmarks.scaling.node_limits import CpuQuotas, shape_links
from hpc.base.files import read_json_lines
from hpc.cluster.testbed import lifecycle
from hpc.cluster.testbed.layout import TestbedNode
from hpc.run.rundir import RunDir
from training.config.dataset_layout import FASHION_MNIST_DIRECTORY

BY_HAND = ROOT / "benchmarks" / "recovery" / "rivals" / "torchrun_ddp.py"
UNLIMITED = "none"
# Images per rank, and of each part of an accumulated step.
BATCH_SIZE = 64
# Share of a core for each node.
SHARE = 0.4
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    nodes: tuple[int, ...] = (1, 2, 4)
    """Sizes; the first is what the others are compared with."""
    links: tuple[str, ...] = (UNLIMITED, "1gbit", "200mbit")
    """Rates of the links, as tc has them; none: not shaped."""
    turns: int = 2
    """Turns of each training."""
    seconds: float = 5.0
    """The shortest time on each link."""
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


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job that trains in a directory of its own."""

    variant: Variant
    nodes: Sequence[str]
    directory: Path
    batch_size: int

    @property
    def log(self) -> Path:
        """A file with a line for each step."""
        return RunDir(self.directory / "run").train_metrics if self.variant.ours else self.directory / "steps.jsonl"

    def submit(self) -> None:
        """Submit it."""
        if self.variant.ours:
            self._submit_ours()
        else:
            self._submit_by_hand()

    def _submit_ours(self) -> None:
        hpc(
            "submit", "--name=run", f"--runs-dir={self.directory}", f"--nodes={len(self.nodes)}", "--gpus-per-node=1",
            "--cpus-per-gpu=1", "--mem=2G", "--time=2h", f"--sbatch=nodelist={','.join(self.nodes)}",
            "--synthetic", "--model=resnet18", "--image-size=32", "--epochs=100000",
            f"--batch-size={self.batch_size}", "--lr=0.01", "--lr-scheduler=constant", "--num-workers=0",
            # Nothing but the scaling is measured, and a slow link makes a step longer, which is no hang.
            "--log-every=1", "--checkpoint-every=2h", "--snapshot-every=off", "--hang-timeout=1h",
            f"--grad-accum-steps={self.variant.accumulate}",
            f"--compress-gradients={'bf16' if self.variant.bf16 else 'none'}",
        )  # fmt: skip

    def _submit_by_hand(self) -> None:
        torchrun = (
            f"{Path(sys.executable).parent}/torchrun --nnodes={len(self.nodes)} --nproc-per-node=1 "
            f"--node-rank=$SLURM_NODEID --master-addr={self.nodes[0]} --master-port=29500 {BY_HAND} "
            f"--data={FASHION_MNIST_DIRECTORY} --output={self.directory} --model=resnet18 --classes=1000 "
            f"--batch-size={self.batch_size} --save-every=1000000 {'--bf16' if self.variant.bf16 else ''}"
        )
        subprocess.run(
            ["sbatch", f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}", "--ntasks-per-node=1",
             "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G", "--time=2:00:00", "--job-name=by-hand",
             f"--output={self.directory}/job.log",
             f"--wrap=srun --cpus-per-task=1 bash -c 'OMP_NUM_THREADS=1 {torchrun}'"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def cancel(self) -> None:
        """End it."""
        if self.variant.ours:
            hpc("cancel", "run", f"--runs-dir={self.directory}")
        else:
            subprocess.run(["scancel", "--name=by-hand"], check=True)

    def wait_for_steps(self, began: float, are_enough: Callable[[list[float]], bool]) -> list[float]:
        """Wait until it has made enough steps since then, and return their times."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not are_enough(times := self._steps_since(began)):
            if time.monotonic() > end:
                texts = (f"{path}:\n{path.read_text()[-2000:]}" for path in self.directory.rglob("*.log"))
                raise TimeoutError(f"{self.variant.name}: no steps in {_PATIENCE_SECONDS:.0f} s\n" + "\n".join(texts))
            time.sleep(0.1)
        return times

    def _steps_since(self, began: float) -> list[float]:
        lines = read_json_lines(self.log) if self.log.exists() else ()
        return [line["time"] for line in lines if line.get("event", "step") == "step" and line["time"] > began]

    def step_seconds(self, seconds: float) -> float:
        """Return how long a step takes from now on; the present one does not count."""
        times = self.wait_for_steps(time.time(), lambda times: len(times) > 2 and times[-1] - times[0] >= seconds)
        return (times[-1] - times[0]) / (len(times) - 1)


def turn(
    variant: Variant, nodes: Sequence[TestbedNode], quotas: CpuQuotas, options: Options, root: Path
) -> list[Sample]:
    """Train on these nodes, and return the images per second on each link."""
    images = BATCH_SIZE * variant.accumulate * len(nodes)
    directory = Path(tempfile.mkdtemp(dir=root))
    training = Training(
        variant=variant, nodes=[node.name for node in nodes], directory=directory, batch_size=images
    )  # fmt: skip
    training.submit()
    training.wait_for_steps(0.0, lambda times: len(times) >= 2)
    found = {}
    quotas.set(SHARE)
    try:
        # On one node nothing is sent.
        for link in options.links if len(nodes) > 1 else (UNLIMITED,):
            shape_links(nodes, None if link == UNLIMITED else link)
            found[link] = images / training.step_seconds(options.seconds)
    finally:
        quotas.set(None)
        shape_links(nodes, None)
        training.cancel()
    return [found]


def rows_of(nodes: int, found: dict[str, list[Sample]]) -> list[Row]:
    """Return a row for each link and training."""
    rows = list[Row]()
    for link in next(iter(found.values()))[0]:
        for name, samples in found.items():
            speeds = sorted(sample[link] for sample in samples)
            rows.append({
                "nodes": nodes, "link": link, "training": name, "images_per_second": round(median(speeds), 1),
                "spread": f"{speeds[0]:.1f} to {speeds[-1]:.1f}",
            })  # fmt: skip
    return rows


def measure(options: Options) -> Findings:
    """Measure all sizes, on a new testbed."""
    most = max(options.nodes)
    if SHARE * most > len(os.sched_getaffinity(0)):
        raise SystemExit(f"{most} nodes want more cores than there are, {SHARE} each")
    rows = list[Row]()
    # Not in /tmp, which each node has for itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-scaling-") as directory, ExitStack() as stack:
        quotas = CpuQuotas()
        # When the testbed has ended, nothing is in the groups any more.
        stack.callback(quotas.remove)
        stack.enter_context(testbed(f"--nodes={most}", "--gpus-per-node=1"))
        nodes = lifecycle.status().nodes
        quotas.add(nodes)
        for count in options.nodes:
            contenders = {
                each.name: partial(turn, each, nodes[:count], quotas, options, Path(directory))
                # Compression changes nothing where nothing is sent.
                for each in VARIANTS[: options.variants if count > 1 else 2]
            }
            rows += rows_of(count, take_turns(contenders, options.turns))
    one = rows[0]["images_per_second"] / rows[0]["nodes"]
    rows = [{**row, "efficiency": round(row["images_per_second"] / row["nodes"] / one, 3)} for row in rows]
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("scaling", Options, measure, small={"nodes": (1, 2), "links": ("200mbit",), "turns": 1, "variants": 2})
