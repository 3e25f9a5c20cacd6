"""The job kind `train`: what each rank runs. Runs on compute nodes."""

from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.config.dataset_layout import check_data
from training.config.train_config import spec_argv


def command(run: RunDir, attempt: int, data: Path | None, memory: NodeDir, python: str) -> list[str]:
    """Our trainer, with this node's copy of the data, unless they are generated."""
    flags = spec_argv(run.spec, run.path, attempt, memory.path, data=find_data(data) if data else None)
    return [python, "-u", "-P", "-m", "training", *flags]


def find_data(staged: Path) -> Path:
    """Where the data are in what was staged: archives often hold one directory with everything in it."""
    inside = [path for path in staged.iterdir() if not path.name.startswith(".")]
    if len(inside) != 1 or not inside[0].is_dir():
        return staged
    try:
        return check_data(staged).path
    except UserError:
        return inside[0]
