"""A tracker for MLflow. Runs on a compute node and on the login node."""

import getpass
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from hpc.base.errors import UserError
from hpc.run.events.history import Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.tracking.tracker import PROJECT, Point, TrackingError, run_id, settings_of

# Tags of the run at MLflow: a prefix for the last step of each series, and our own id of the run.
_SENT, _RUN = "torchrelay.sent.", "torchrelay.run"
# MLflow accepts at most 1,000 metrics and tags, and 100 parameters, in one request.
_METRICS, _PARAMETERS = 900, 100
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowTracker:
    """An MLflow run on the server or in the database that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self.check()
        # By default MLflow waits four minutes for a missing server, and prints the URL, which may have a password.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        uri = os.environ["MLFLOW_TRACKING_URI"]
        self._shown_uri = re.sub(r"(?<=://)[^/@]*@", "", uri)
        with self._errors():
            self._client = MlflowClient(uri)
            found = self._find_or_create(run, spec)
            self.run_id = str(found.info.run_id)
            # A parameter cannot change: after an `hpc resume` with changes, the first values stay.
            new = [(name, value) for name, value in settings_of(run, spec).items() if name not in found.data.params]
            for first in range(0, len(new), _PARAMETERS):
                some = [Param(name, str(value)) for name, value in new[first : first + _PARAMETERS]]
                self._client.log_batch(self.run_id, params=some)
        tags = found.data.tags.items()
        self.sent = {name.removeprefix(_SENT): int(step) for name, step in tags if name.startswith(_SENT)}
        page = f"{self._shown_uri.rstrip('/')}/#/experiments/{found.info.experiment_id}/runs/{self.run_id}"
        self.url: str | None = page if uri.startswith("http") else self._shown_uri

    @staticmethod
    def check() -> None:
        """Raise UserError if MLFLOW_TRACKING_URI is not set."""
        # MLflow's own default is a file in the current directory, which differs on a node.
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise UserError("the address of MLflow is not set: type export MLFLOW_TRACKING_URI=http://HOST:5000")

    def send(self, points: Sequence[Point]) -> None:
        """Send points. After an interrupted call, the next call repeats points, of which MLflow keeps a single copy."""
        size = max(1, _METRICS // max((len(point.values) + 1 for point in points), default=1))
        for first in range(0, len(points), size):
            some = points[first : first + size]
            metrics = [
                Metric(name, value, round(1000 * (point.time or 0.0)), point.step)
                for point in some
                for name, value in point.values.items()
            ]
            newest = {point.series: point.step for point in some}
            tags = [RunTag(f"{_SENT}{series}", str(step)) for series, step in newest.items()]
            with self._errors():
                self._client.log_batch(self.run_id, metrics=metrics, tags=tags)
            self.sent |= newest

    def close(self, outcome: Outcome | None) -> None:
        """Tell MLflow how the run has ended. A run that goes on stays RUNNING."""
        with self._errors():
            if outcome is None:
                self._client.update_run(self.run_id, status="RUNNING")
            else:
                self._client.set_terminated(self.run_id, _STATUS[outcome])

    def delete(self) -> None:
        """Delete the run at MLflow. Raises TrackingError."""
        with self._errors():
            self._client.delete_run(self.run_id)

    def _find_or_create(self, run: RunDir, spec: RunSpec) -> Run:
        if spec.mlflow_run:
            return self._client.get_run(spec.mlflow_run)
        # A run that was submitted without --tracker mlflow has no id in its spec.
        experiment, own = self._experiment(), run_id(spec)
        if found := self._client.search_runs([experiment], filter_string=f"tags.`{_RUN}` = '{own}'", max_results=1):
            return found[0]
        tags = {_RUN: own, "mlflow.user": getpass.getuser(), "mlflow.source.name": str(run.path)}
        return self._client.create_run(experiment, run_name=run.name, tags=tags)

    def _experiment(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if known := self._client.get_experiment_by_name(name):
            return str(known.experiment_id)
        return self._client.create_experiment(name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (MlflowException, OSError) as error:
            text = str(error).strip().partition("\n")[0]
            # The text about an unreachable server ends with the exception's class and reason: only these are kept.
            raise TrackingError(f"MLflow at {self._shown_uri}: {text.rpartition('(Caused by ')[2]}") from error
