"""The job kind `train`: what each rank runs. Runs on compute nodes."""

import dataclasses
from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.config.dataset_layout import check_data
from training.config.train_config import TrainConfig, to_argv


def command(
    config: TrainConfig, run: RunDir, attempt: int, data: Path | None, memory: NodeDir, python: str
) -> list[str]:
    """Our trainer, with the data, unless they are generated, and the memory where this node has them."""
    flags = to_argv(dataclasses.replace(config, data=str(find_data(data))) if data else config)
    where = [f"--run-dir={run.path}", f"--attempt={attempt}", f"--node-dir={memory.path}"]
    return [python, "-u", "-P", "-m", "training", *flags, *where]


def find_data(staged: Path) -> Path:
    """Where the data are in what was staged: archives often hold one directory with everything in it."""
    inside = [path for path in staged.iterdir() if not path.name.startswith(".")]
    if len(inside) != 1 or not inside[0].is_dir():
        return staged
    try:
        return check_data(staged).path
    except UserError:
        return inside[0]
