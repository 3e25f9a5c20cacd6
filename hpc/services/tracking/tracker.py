"""What a run is at a tracker: one run of the same name, however often it is interrupted. Runs wherever it is sent.

The tracker knows what it has: the last step of each series. So nothing that a node had sent is sent twice by the next
one, or by `hpc sync`, and no file has to agree with it.
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
"""W&B's project and MLflow's experiment, unless the environment names another."""
# Of W&B: at most 64 characters.
_LONGEST_ID_NAME = 50


class TrackingError(TorchrelayError):
    """A tracker cannot be reached, or refuses what is sent."""


class Tracker(Protocol):
    """A run at a tracker. Each method raises TrackingError."""

    sent: dict[str, int]
    """The last step of each series that the tracker has."""

    @property
    def url(self) -> str | None:
        """Where people see it."""

    def send(self, points: Sequence[Point]) -> None:
        """Send points, and keep `sent`."""

    def close(self, outcome: Outcome | None) -> None:
        """Send the rest, and how the run has ended; None: it goes on, now or later."""


def open_tracker(service: Service, run: RunDir, spec: RunSpec) -> Tracker:
    """The run at a tracker, made there if it is not there yet.

    Raises:
        UserError: its package is not installed, or the environment does not say where it is.
        TrackingError: it cannot be reached, or refuses.
    """
    need_package(service, service, TITLES[service])
    # Each takes seconds to import.
    if service == "wandb":
        from hpc.services.tracking.wandb_tracker import WandbTracker  # noqa: PLC0415

        return WandbTracker(run, spec)
    from hpc.services.tracking.mlflow_tracker import MlflowTracker  # noqa: PLC0415

    return MlflowTracker(run, spec)


def run_id(spec: RunSpec) -> str:
    """What identifies the run at a tracker, in all its attempts: another run of the same name has another one."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", spec.name)[:_LONGEST_ID_NAME]
    return f"{name}-{spec.id}" if spec.id else name


def rank_variables(run: RunDir, spec: RunSpec) -> dict[str, str]:
    """With these, `wandb.init()` and `mlflow.start_run()` of a user's script continue the run after an interruption."""
    variables = {
        "WANDB_RUN_ID": run_id(spec), "WANDB_RESUME": "allow", "WANDB_NAME": spec.name, "WANDB_DIR": str(run.path),
    }  # fmt: skip
    return {**variables, "MLFLOW_RUN_ID": spec.mlflow_run} if spec.mlflow_run else variables


def settings_of(run: RunDir, spec: RunSpec) -> dict[str, Any]:
    """What the run was submitted with, by name: the flags of the trainer, or the command line of a script."""
    training, resources, given = spec.training, spec.resources, dict[str, Any]()
    if training:
        given |= asdict(training.train) | {"recipe": training.recipe, "forked_from": training.forked_from}
    else:
        given["script"] = shlex.join(spec.script)
    given |= {
        "data": spec.data, "run_dir": str(run.path),
        "nodes": resources.nodes, "gpus_per_node": resources.gpus_per_node,
        "commit": run.revision.read_text().strip() if run.revision.exists() else None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}
