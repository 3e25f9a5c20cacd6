"""What one rank runs: the training flags, and where and as which attempt. Runs on every rank; imports no torch.

A rank that a node agent starts reads them from the run's `spec.json`; a rank that was started by hand parses its
command line (`training.config.command_line`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.core.errors import UserError
from training.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What one rank runs."""

    train: TrainConfig
    recipe: str | None = None
    run_dir: Path = Path("runs/standalone")
    """Directory of all files that the run writes."""
    attempt: int = 1
    """Number of this attempt at the run."""
    node_dir: Path | None = None
    """Directory in this node's memory for snapshots and heartbeats, which outlive the ranks."""
    fault: str = ""
    """For tests: the fault to inject, POINT@STEP:RANK (training.runtime.fault_injection). Also TORCHRELAY_FAULT."""


def spec_argv(
    spec: Path, run_dir: Path, attempt: int, node_dir: Path, *, data: Path | None = None, fault: str = ""
) -> list[str]:
    """The arguments of `python -m training` for a rank that reads its flags from a file."""
    optional = {"data": data or "", "fault": fault}
    argv = [f"--spec={spec}", f"--run-dir={run_dir}", f"--attempt={attempt}", f"--node-dir={node_dir}"]
    return argv + [f"--{name}={value}" for name, value in optional.items() if value]


def is_from_spec(argv: Sequence[str]) -> bool:
    """Whether these are arguments as `spec_argv` makes them."""
    return bool(argv) and argv[0].startswith("--spec=")


def read_spec(argv: Sequence[str]) -> RankOptions:
    """The options of a rank that a node agent starts.

    Args:
        argv: as `spec_argv` made them.

    Raises:
        UserError: the file cannot be read, or has flags of another version.
    """
    given = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    try:
        spec = json.loads(Path(given["spec"]).read_bytes())
        train = TrainConfig(**spec["train"])
    except (OSError, ValueError) as error:
        raise UserError(f"{given['spec']} cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{given['spec']} is damaged or from another version: {error!r}") from error
    return RankOptions(
        train=replace(train, data=given["data"]) if "data" in given else train,
        recipe=spec.get("recipe"),
        run_dir=Path(given["run-dir"]),
        attempt=int(given["attempt"]),
        node_dir=Path(given["node-dir"]),
        fault=given.get("fault", ""),
    )
