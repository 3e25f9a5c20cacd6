"""How long a training on Fashion-MNIST takes to 95.5 % on the test set, start of the process included."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.gpu.part import PartOptions, data_directory, finish, goal

FLAGS = [
    "--model=resnet56", "--epochs=40", "--batch-size=512", "--lr=0.4", "--nesterov", "--warmup-epochs=3", "--amp=bf16",
    "--random-erasing=0.25", "--flip=on", "--label-smoothing=0.1", "--ema-decay=0.998", "--val-split=0",
]  # fmt: skip
SMALL = ["--model=small-cnn", "--epochs=1", "--batch-size=64", "--val-split=0"]
GOAL, GOAL_SECONDS = 0.955, 60.0


@dataclass(frozen=True, kw_only=True)
class Options(PartOptions):
    """What to train."""


def main() -> None:
    """Train and print."""
    options = tyro.cli(Options)
    with tempfile.TemporaryDirectory() as directory:
        data = data_directory(Path(directory) if options.small else None)
        flags = [*(SMALL if options.small else FLAGS), f"--data={data}", f"--run-dir={directory}/run"]
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "training", *flags], check=True)
        seconds = round(time.monotonic() - began, 1)
        accuracy = json.loads((Path(directory) / "run/final/result.json").read_text())["test_accuracy"]
    row = {"training": " ".join(flags[:-2]), "test_accuracy": accuracy, "seconds": seconds}
    goals = [
        goal("Fashion-MNIST: test accuracy", accuracy, f">= {GOAL}", met=accuracy >= GOAL),
        goal("Fashion-MNIST: seconds", seconds, f"< {GOAL_SECONDS:g}", met=seconds < GOAL_SECONDS),
    ]
    finish(options, [row], goals)


if __name__ == "__main__":
    main()
