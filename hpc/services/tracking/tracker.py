"""A run at a tracker: it stays one run, however often it is interrupted. Runs on compute nodes and the login node.

The tracker itself stores the last step of each series. So nodes and `hpc sync` send only newer points, and no file has
to agree with the tracker.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hpc.base.errors import TorchrelayError, need_package
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
    """A run at a tracker. Each method raises TrackingError."""

    sent: dict[str, int]
    """The last step of each series that the tracker has."""

    @property
    def url(self) -> str | None:
        """The address of the run's page, or of the directory or database with the run; None if unknown."""

    def send(self, points: Sequence[Point]) -> None:
        """Send points, and update `sent`."""

    def close(self, outcome: Outcome | None) -> None:
        """Send what is not yet sent, and the outcome. An outcome of None means that the run goes on, now or later."""


def open_tracker(service: Service, run: RunDir, spec: RunSpec) -> Tracker:
    """Connect to the record of a run at a tracker, and create the record if there is none.

    Raises:
        UserError: the tracker's package is not installed, or its address or key is not set.
        TrackingError: the tracker cannot be reached, or refuses the request.
    """
    need_package(service, service, TITLES[service])
    # Each module takes seconds to import.
    if service == "wandb":
        from hpc.services.tracking.wandb_tracker import WandbTracker  # noqa: PLC0415

        return WandbTracker(run, spec)
    from hpc.services.tracking.mlflow_tracker import MlflowTracker  # noqa: PLC0415

    return MlflowTracker(run, spec)


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
    """Return the run's settings by name: the flags of the classifier, or the command line of a script."""
    training, resources, given = spec.training, spec.resources, dict[str, Any]()
    if training:
        given |= asdict(training.train) | {"recipe": training.recipe, "forked_from": training.forked_from}
    else:
        given["script"] = shlex.join(spec.script)
    given |= {
        "data": spec.data, "run_dir": str(run.path),
        "nodes": str(resources.nodes), "gpus_per_node": str(resources.gpus_per_node),
        "commit": run.revision.read_text().strip() if run.revision.exists() else None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}
