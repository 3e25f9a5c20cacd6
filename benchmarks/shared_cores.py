"""What runs that share the cores of a machine cost each other, by how the idle threads of OpenMP wait.

    .venv/bin/python -m benchmarks.shared_cores

Trains small-cnn on Fashion-MNIST with `--cluster local`: one run of one rank, then two at once, then one run of two
pretended nodes with two threads a rank, which is more than there are cores. Kinds, which take turns, two each:

- passive: OMP_WAIT_POLICY=passive, as Torchrelay starts its ranks unless the user sets it;
- spinning: GOMP_SPINCOUNT=300000, which is what libgomp does without any setting;
- short: GOMP_SPINCOUNT=1000, a few microseconds.

Prints the medians, in images per second of all runs together, as a table in Markdown, and writes
benchmarks/results/shared_cores.json. Takes six minutes on two cores that nobody else uses.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks import record

TURNS = 2
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


def images_per_second(runs: int, nodes: str, environment: Mapping[str, str]) -> float:
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
    return sum(median(float(json.loads(line)["images_per_second"]) for line in lines[1:]) for lines in logs)


def main() -> None:
    """Measure, print the table, write the results."""
    machine, rows = record.machine(), []
    for workload, (runs, nodes, more) in WORKLOADS.items():
        rates = dict[str, list[float]]((kind, []) for kind in KINDS)
        for _ in range(TURNS):
            for kind, environment in KINDS.items():
                rates[kind].append(images_per_second(runs, nodes, {**more, **environment}))
        rows.append({"images/s": workload, **{kind: round(median(found)) for kind, found in rates.items()}})
        rows[-1] |= {f"{kind}, range": f"{min(found):.0f}-{max(found):.0f}" for kind, found in rates.items()}
        print(f"{workload}: {rates}", file=sys.stderr, flush=True)
    print(record.table(rows))
    record.write("shared_cores", machine, rows, turns=TURNS)


if __name__ == "__main__":
    main()
