"""The job kind `train`: what each rank runs. Runs on compute nodes; pure."""

import dataclasses
import sys
from pathlib import Path

from hpc.nodedir import NodeDir
from hpc.rundir import RunDir
from training.config import TrainConfig, to_argv


def command(config: TrainConfig, run: RunDir, attempt: int, data: Path, memory: NodeDir) -> list[str]:
    """Our trainer, with the data and the memory where this node has them."""
    flags = to_argv(dataclasses.replace(config, data=str(data)))
    where = [f"--run-dir={run.path}", f"--attempt={attempt}", f"--node-dir={memory.path}"]
    return [sys.executable, "-u", "-P", "-m", "training", *flags, *where]
