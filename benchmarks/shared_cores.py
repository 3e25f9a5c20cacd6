"""What runs that share the cores of a machine cost each other, by how the idle threads of OpenMP wait.

    .venv/bin/python -m benchmarks.shared_cores

Trains small-cnn on Fashion-MNIST with `--cluster local`: one run of one rank, then two at once, then one run of two
simulated nodes with two threads a rank, which is more than there are cores. The kinds take turns:

- passive: OMP_WAIT_POLICY=passive, as Torchrelay starts its ranks unless the user sets it;
- spinning: GOMP_SPINCOUNT=300000, which is what libgomp does without any setting;
- short: GOMP_SPINCOUNT=1000, a few microseconds.

The table has the images per second of all runs together. Takes six minutes on two cores that nobody else uses.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import Findings, Flags, Row, Sample, benchmark, take_turns

KINDS = {
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "short": {"GOMP_SPINCOUNT": "1000"},
}
TRAINING = ("--model=small-cnn", "--data=fashion-mnist", "--batch-size=256", "--epochs=1", "--log-every=20")
# The number of runs, their flags, and what is set for them.
WORKLOADS: Mapping[str, tuple[int, str, Mapping[str, str]]] = {
    "one run": (1, "--nodes=1", {}),
    "two runs": (2, "--nodes=1", {}),
    "two nodes of two threads": (1, "--nodes=2", {"OMP_NUM_THREADS": "2"}),
}


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    turns: int = 2
    """Turns of each kind."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of waiting."""


def images_per_second(runs: int, nodes: str, environment: Mapping[str, str]) -> list[Sample]:
    """Train some runs at once, and add up the median rates of their logged steps, without the first."""
    flags = ("--cluster=local", nodes, "--gpus-per-node=1", *TRAINING, "--wait")
    with tempfile.TemporaryDirectory() as directory:
        names = [f"run-{number}" for number in range(runs)]
        submitted = [
            subprocess.Popen(
                [sys.executable, "-m", "hpc", "submit", *flags, f"--runs-dir={directory}", f"--name={name}"],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
            )
            for name in names
        ]
        codes = [run.wait() for run in submitted]
        if any(codes):
            raise RuntimeError(f"hpc submit ended with {codes}")
        logs = [Path(directory, name, "metrics", "train.jsonl").read_text().splitlines() for name in names]
    rates = (median(float(json.loads(line)["images_per_second"]) for line in lines[1:]) for lines in logs)
    return [{"images_per_second": sum(rates)}]


def measure(options: Options) -> Findings:
    """Let the kinds take turns with each workload."""
    rows: list[Row] = []
    for workload, (runs, nodes, more) in WORKLOADS.items():
        contenders = {kind: partial(images_per_second, runs, nodes, {**more, **KINDS[kind]}) for kind in options.kinds}
        found = take_turns(contenders, options.turns)
        rates = {kind: [each["images_per_second"] for each in samples] for kind, samples in found.items()}
        medians = {kind: round(median(each)) for kind, each in rates.items()}
        ranges = {f"{kind}, range": f"{min(each):.0f}-{max(each):.0f}" for kind, each in rates.items()}
        rows.append({"images/s": workload, **medians, **ranges})
    return Findings(tables={"rows": rows})


if __name__ == "__main__":
    benchmark("shared_cores", Options, measure, small={"turns": 1, "kinds": ("passive",)})
