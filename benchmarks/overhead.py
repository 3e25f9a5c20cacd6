"""What a training costs when nothing fails: a script under `hpc submit`, and under `srun torchrun`.

    .venv/bin/python -m benchmarks.overhead

The same network, data and batch size on two nodes with a rank each, on a testbed of its own, which needs root: a
script with `state()`, a script without a line for Torchrelay, and this script under a batch script that is written by
hand. They take turns, so that a machine which slows down does so for all of them. Measured are

- the start: from the accepted job until all ranks have done a step;
- images a second, in steps without a wait;
- the CPU time of a step, of all processes of the job;
- the memory of the job's processes on a node (PSS), without shared memory, which has the snapshots.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import Findings, Flags, Row, Sample, benchmark, medians, spread, take_turns
from benchmarks.hpc_commands import testbed
from benchmarks.processes import cpu_seconds, memory_bytes, naming
from benchmarks.recovery.contenders import CONTENDERS, NODES, Contender, Workload
from hpc.cluster.testbed.system import wait_until

_PATIENCE_SECONDS = 300.0
# The agents have found the intervals of snapshots by then.
_SETTLED_STEPS = 60
_KINDS = ("plain", "unchanged", "ours")


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 5
    """Trainings of each kind."""
    seconds: float = 30.0
    """Seconds for which each training is watched."""
    batch_size: int = 512
    """Images of a step, of both ranks together."""


def train(contender: Contender, options: Options, directory: Path) -> list[Sample]:
    """Submit a training, watch it, and end it."""
    workload = Workload(rivals=Path(sys.executable), images=60_000, batch_size=options.batch_size, wait=0.0)
    directory = Path(tempfile.mkdtemp(dir=directory, prefix=f"{contender.key}-")) / "run"
    training = contender.start(directory, workload)
    accepted = time.time()

    def times(event: str) -> list[float]:
        return [float(entry["time"]) for entry in training.log() if entry["event"] == event]

    try:
        wait_until(
            lambda: len(times("step")) >= _SETTLED_STEPS, seconds=_PATIENCE_SECONDS, what=f"{training.name} to train"
        )
        pids = list(naming(directory))
        began, steps, cpu = time.time(), len(times("step")), sum(map(cpu_seconds, pids))
        time.sleep(options.seconds)
        steps, seconds = len(times("step")) - steps, time.time() - began
        return [{
            "start, s": max(times("first_step")) - accepted,
            "images/s": steps * options.batch_size / seconds,
            "CPU of a step, ms": 1000 * (sum(map(cpu_seconds, pids)) - cpu) / steps,
            "memory of a node, MB": memory_bytes(pids, "Pss_Anon", "Pss_File") / NODES / 1e6,
        }]  # fmt: skip
    finally:
        training.cancel()
        wait_until(
            lambda: not subprocess.check_output(["squeue", "--noheader"], text=True).strip(),
            seconds=_PATIENCE_SECONDS, what="the job to end",
        )  # fmt: skip


def import_seconds() -> Sample:
    """Return how long a Python takes that imports torch and ends."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {"import of torch, s": time.perf_counter() - began}


def row(kind: str, samples: list[Sample], plain: list[Sample]) -> Row:
    """Return a row of the table: medians, and the medians of the ratios to `srun torchrun` in the same turn."""
    ratios = [{name: own[name] / other[name] for name in own} for own, other in zip(samples, plain, strict=True)]
    ratio = medians(ratios, 3)
    return {
        "training": CONTENDERS[kind].title,
        **medians(samples, 1),
        **{f"{name}, ratio": ratio[name] for name in samples[0] if name != "start, s"},
        **spread([each["start, s"] for each in samples], 1, " start, s"),
        "all": samples,
    }


def measure(options: Options) -> Findings:
    """Let the kinds of trainings take turns."""
    # Not below /tmp, which each node has for itself.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-overhead-") as made,
        testbed(f"--nodes={NODES}", "--gpus-per-node=1"),
    ):
        trainings = {kind: partial(train, CONTENDERS[kind], options, Path(made)) for kind in _KINDS}
        found = take_turns(trainings, options.turns, warm_up=True)
    imports = [import_seconds() for _ in range(options.turns)]
    rows = [row(kind, samples, found["plain"]) for kind, samples in found.items()]
    return Findings(tables={"rows": rows, "import": [medians(imports, 1)]})


if __name__ == "__main__":
    benchmark("overhead", Options, measure, small={"turns": 1, "seconds": 5.0}, packages=("torch",))
