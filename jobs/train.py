"""The job kind `train`: what each rank runs. Runs on compute nodes; pure."""

import dataclasses
import sys
from pathlib import Path

from hpc.rundir import RunDir
from training.config import TrainConfig, to_argv


def command(config: TrainConfig, run: RunDir, attempt: int, data: Path) -> list[str]:
    """Our trainer, with the data where this node has them."""
    flags = to_argv(dataclasses.replace(config, data=str(data)))
    return [sys.executable, "-u", "-P", "-m", "training", *flags, f"--run-dir={run.path}", f"--attempt={attempt}"]
