"""A run at a tracker: it stays one run, however often it is interrupted. Runs on compute nodes and the login node.

The tracker itself stores the last step of each series. So nodes and `hpc sync` send only newer points, and no file has
to agree with the tracker.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hpc.base import program
from hpc.base.errors import TorchrelayError
from hpc.run.events.history import Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service
from hpc.services.tracking.points import Point

TITLES: Mapping[Service, str] = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
PROJECT = "torchrelay"
"""Name of the project at W&B and of the experiment at MLflow, unless the environment names another."""
# W&B allows 64 characters in an id.
_LONGEST_ID_NAME = 50


class TrackingError(TorchrelayError):
    """A tracker cannot be reached, or refuses the request."""


class Tracker(Protocol):
    """A run at a tracker, which is created there if it does not exist. All but `check` raise TrackingError."""

    sent: dict[str, int]
    """The last step of each series that the tracker has."""
    url: str | None
    """The address of the run's page, or of the directory or database with the run; None if unknown."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None: ...

    @staticmethod
    def check() -> None:
        """Raise UserError if the address or the key of the tracker is not set."""

    def send(self, points: Sequence[Point]) -> None:
        """Send points, and update `sent`."""

    def close(self, outcome: Outcome | None) -> None:
        """Send what is not yet sent, and the outcome. An outcome of None means that the run goes on, now or later."""


def run_id(spec: RunSpec) -> str:
    """Return the run's id at a tracker, the same in all attempts. Another run of the same name has another id."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", spec.name)[:_LONGEST_ID_NAME]
    return f"{name}-{spec.id}" if spec.id else name


def rank_variables(run: RunDir, spec: RunSpec) -> dict[str, str]:
    """Return environment variables with which `wandb.init()` and `mlflow.start_run()` in a script continue the run."""
    variables = {
        "WANDB_RUN_ID": run_id(spec), "WANDB_RESUME": "allow", "WANDB_NAME": spec.name, "WANDB_DIR": str(run.path),
    }  # fmt: skip
    return {**variables, "MLFLOW_RUN_ID": spec.mlflow_run} if spec.mlflow_run else variables


def settings_of(run: RunDir, spec: RunSpec) -> dict[str, Any]:
    """Return the run's settings by name: the flags of its program, and the command line of a script."""
    from hpc.programs.program_kinds import program_of_run  # noqa: PLC0415 - `hpc status` needs no program

    settings = program.values_of(program_of_run(spec)) | {
        "script": shlex.join(spec.script) or None, "forked_from": spec.forked_from,
        "data": spec.data, "run_dir": str(run.path),
        "nodes": str(spec.resources.nodes), "gpus_per_node": str(spec.resources.gpus_per_node),
        "commit": run.revision.read_text().strip() if run.revision.exists() else None,
    }  # fmt: skip
    return {name.replace("-", "_"): value for name, value in settings.items() if value is not None}
