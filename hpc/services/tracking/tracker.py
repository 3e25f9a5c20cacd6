"""A run at a tracker, and what it gets: it stays one run, however often it is interrupted. Runs on all machines.

The tracker itself stores the last step of each series. So nodes and `hpc sync` send only newer points, and no file has
to agree with the tracker.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc.base import program
from hpc.base.errors import TorchrelayError
from hpc.base.files import read_json_lines
from hpc.base.text import words_without_secrets
from hpc.run.events.history import Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service

TITLES: Mapping[Service, str] = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
PROJECT = "torchrelay"
"""Name of the project at W&B and of the experiment at MLflow, unless the environment names another."""
# W&B allows 64 characters in an id.
_LONGEST_ID_NAME = 50
BOOKKEEPING = frozenset(
    {"step", "epoch", "attempt", "time", "train_seconds", "seconds", "correct", "total", "corrupt"}
)  # fmt: skip
"""Fields that get no curve, because they identify a line, or only complete other numbers."""


# --- the numbers in `metrics/*.jsonl`, of the classifier or a script, by the names that trackers show ---


@dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics in one line of a file."""

    series: str
    """`train`, the split of an evaluation, or the name of another file."""
    step: int
    time: float | None
    """Seconds since the epoch; None if the line has no time."""
    values: Mapping[str, float]
    """The values by name, such as `train/loss`."""


def read_points(metrics: Path, sent: Mapping[str, int]) -> list[Point]:
    """Return the points that are still to be sent, sorted by step.

    `metrics` is the directory of the files, and `sent` has the last step that was sent of each series. If a restart
    repeated a step, its later line replaces the earlier one.
    """
    found = dict[tuple[int, str], Point]()
    for path in sorted(metrics.glob("*.jsonl")):
        for record in read_json_lines(path):
            point = _point(path.stem, record)
            if point is not None and point.step > sent.get(point.series, -1):
                found[point.step, point.series] = point
    return [found[key] for key in sorted(found)]


def _point(name: str, record: Mapping[str, Any]) -> Point | None:
    """Return the point of a line; None if a script has written a line without a whole number as `step`."""
    step, time, split = record.get("step"), record.get("time"), record.get("split")
    if type(step) is not int:
        return None
    series = split if name == "eval" and isinstance(split, str) else name
    values = {
        f"{series}/{key}": float(value)
        for key, value in record.items()
        if key not in BOOKKEEPING and type(value) in {int, float}
    }
    if type(epoch := record.get("epoch")) in {int, float}:
        values["epoch"] = float(epoch)  # type: ignore[arg-type]  # a number
    return Point(series=series, step=step, time=time if type(time) in {int, float} else None, values=values)


# --- trackers ---


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
        "script": shlex.join(words_without_secrets(spec.script)) or None, "forked_from": spec.forked_from,
        "data": spec.data, "run_dir": str(run.path),
        "nodes": str(spec.resources.nodes), "gpus_per_node": str(spec.resources.gpus_per_node),
        "commit": run.revision.read_text().strip() if run.revision.exists() else None,
    }  # fmt: skip
    return {name.replace("-", "_"): value for name, value in settings.items() if value is not None}
