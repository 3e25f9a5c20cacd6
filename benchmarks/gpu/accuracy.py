"""How long a training on Fashion-MNIST takes to 95.5 % on the test set, start of the process included."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.part import Found, data_directory, goal

FLAGS = [
    "--model=resnet56", "--epochs=40", "--batch-size=512", "--lr=0.4", "--nesterov", "--warmup-epochs=3", "--amp=bf16",
    "--random-erasing=0.25", "--flip=on", "--label-smoothing=0.1", "--ema-decay=0.998", "--val-split=0",
]  # fmt: skip
SMALL = ["--model=small-cnn", "--epochs=1", "--batch-size=64", "--val-split=0"]
GOAL, GOAL_SECONDS = 0.955, 60.0


def measure(*, small: bool) -> Found:
    """Train once."""
    flags = SMALL if small else FLAGS
    with tempfile.TemporaryDirectory() as directory:
        data = data_directory(Path(directory) if small else None)
        began = time.monotonic()
        command = [sys.executable, "-m", "training", *flags, f"--data={data}", f"--run-dir={directory}/run"]
        subprocess.run(command, check=True)
        seconds = round(time.monotonic() - began, 1)
        accuracy = json.loads((Path(directory) / "run/final/result.json").read_text())["test_accuracy"]
    return [{"training": " ".join(flags), "test_accuracy": accuracy, "seconds": seconds}], [
        goal("Fashion-MNIST: test accuracy", accuracy, f">= {GOAL}", met=accuracy >= GOAL),
        goal("Fashion-MNIST: seconds", seconds, f"< {GOAL_SECONDS:g}", met=seconds < GOAL_SECONDS),
    ]
