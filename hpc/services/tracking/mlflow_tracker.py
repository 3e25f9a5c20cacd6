"""A tracker for MLflow. Runs on a compute node and on the login node."""

import getpass
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from hpc.base.errors import UserError
from hpc.run.events.history import Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.tracking.points import Point
from hpc.services.tracking.tracker import PROJECT, TrackingError, run_id, settings_of

_T = TypeVar("_T")
# Tags of the run at MLflow: a prefix for the last step of each series, and our own id of the run.
_SENT, _RUN = "torchrelay.sent.", "torchrelay.run"
# MLflow accepts at most 1,000 metrics and tags, and 100 parameters, in one request.
_METRICS, _PARAMETERS = 900, 100
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowTracker:
    """An MLflow run on the server or in the database that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._client, uri = _client()
        with _errors(uri):
            found = _find_or_create(self._client, run, spec)
            self._run_id = found.info.run_id
            settings = {name: str(value) for name, value in settings_of(run, spec).items()}
            # A parameter cannot change: after an `hpc resume` with changes, the first values stay.
            new = [Param(name, value) for name, value in settings.items() if name not in found.data.params]
            for batch in _batches(new, _PARAMETERS):
                self._client.log_batch(self._run_id, params=batch)
        tags = found.data.tags.items()
        self._uri = uri
        self.sent = {name.removeprefix(_SENT): int(step) for name, step in tags if name.startswith(_SENT)}
        shown = _without_password(uri)
        page = f"{shown.rstrip('/')}/#/experiments/{found.info.experiment_id}/runs/{self._run_id}"
        self.url = page if uri.startswith("http") else shown

    def send(self, points: Sequence[Point]) -> None:
        """Send points. After an interrupted call, the next call repeats points, of which MLflow keeps a single copy."""
        metrics = [
            (point, Metric(name, value, round(1000 * (point.time or 0.0)), point.step))
            for point in points
            for name, value in point.values.items()
        ]
        for batch in _batches(metrics, _METRICS):
            whole = {point.series: point.step for point, _ in batch}
            # The last point may have further metrics in the next batch, so it does not count as sent.
            last = batch[-1][0]
            if batch[-1] is not metrics[-1]:
                whole[last.series] = last.step - 1
            tags = [RunTag(f"{_SENT}{series}", str(step)) for series, step in whole.items()]
            with _errors(self._uri):
                self._client.log_batch(self._run_id, metrics=[metric for _, metric in batch], tags=tags)
            self.sent |= whole

    def close(self, outcome: Outcome | None) -> None:
        """Tell MLflow how the run has ended. A run that goes on stays RUNNING."""
        with _errors(self._uri):
            if outcome is None:
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._client.set_terminated(self._run_id, _STATUS[outcome])


def create_run(run: RunDir, spec: RunSpec) -> str:
    """Make the run at MLflow, and return its id, which the server chooses. Raises UserError or TrackingError."""
    client, uri = _client()
    with _errors(uri):
        return str(_create(client, run, spec).info.run_id)


def delete_run(mlflow_run: str) -> None:
    """Delete the run that a failed submission has made at MLflow. Raises TrackingError."""
    client, uri = _client()
    with _errors(uri):
        client.delete_run(mlflow_run)


def check_address() -> str:
    """Return MLFLOW_TRACKING_URI. Raises UserError if it is not set."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    # MLflow's own default is a file in the current directory, which differs on a node.
    raise UserError("the address of MLflow is not set: type export MLFLOW_TRACKING_URI=http://HOST:5000")


def _client() -> tuple[MlflowClient, str]:
    uri = check_address()
    # By default MLflow waits four minutes for a missing server.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # MLflow would print the URL, which may have a password.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    with _errors(uri):
        return MlflowClient(uri), uri


def _find_or_create(client: MlflowClient, run: RunDir, spec: RunSpec) -> Run:
    if spec.mlflow_run:
        return client.get_run(spec.mlflow_run)
    # A run that was submitted without --tracker mlflow has no id in its spec.
    own = f"tags.`{_RUN}` = '{run_id(spec)}'"
    found = client.search_runs([_experiment(client)], filter_string=own, max_results=1)
    return found[0] if found else _create(client, run, spec)


def _create(client: MlflowClient, run: RunDir, spec: RunSpec) -> Run:
    tags = {_RUN: run_id(spec), "mlflow.user": getpass.getuser(), "mlflow.source.name": str(run.path)}
    return client.create_run(_experiment(client), run_name=run.name, tags=tags)


def _experiment(client: MlflowClient) -> str:
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    if known := client.get_experiment_by_name(name):
        return str(known.experiment_id)
    try:
        return client.create_experiment(name)
    except MlflowException:
        if known := client.get_experiment_by_name(name):  # another submission has just made it
            return str(known.experiment_id)
        raise


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:
        text = str(error).strip().partition("\n")[0]
        # The text about an unreachable server ends with the exception's class and reason: only these are kept.
        raise TrackingError(f"MLflow at {_without_password(uri)}: {text.rpartition('(Caused by ')[2]}") from error


def _without_password(uri: str) -> str:
    return re.sub(r"(?<=://)[^/@]*@", "", uri)


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[first : first + size] for first in range(0, len(items), size))
