"""Chooses the class of a tracker, and makes the run at MLflow for `hpc submit`. Runs on all machines."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpc.base.errors import TorchrelayError, need_package
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service
from hpc.services.tracking.tracker import TITLES, Tracker, TrackingError


def tracker_of(service: Service) -> type[Tracker]:
    """Return the class for a tracker. Raises UserError if the tracker's package is not installed."""
    need_package(service, service, TITLES[service])
    # Each module takes seconds to import.
    if service == "wandb":
        from hpc.services.tracking.wandb_tracker import WandbTracker  # noqa: PLC0415

        return WandbTracker
    from hpc.services.tracking.mlflow_tracker import MlflowTracker  # noqa: PLC0415

    return MlflowTracker


@contextmanager
def at_trackers(run: RunDir, spec: RunSpec) -> Iterator[RunSpec]:
    """Make the run at MLflow if its flags name MLflow, and yield the spec with the run's id there.

    The login node makes it, as nodes may not reach the server. A failed submission deletes it. Raises TrackingError.
    """
    if "mlflow" not in spec.tracker:
        yield spec
        return
    from hpc.services.tracking.mlflow_tracker import MlflowTracker  # noqa: PLC0415 - takes a second

    tracker = MlflowTracker(run, spec)
    try:
        yield dataclasses.replace(spec, mlflow_run=tracker.run_id)
    except (TorchrelayError, OSError):
        with suppress(TrackingError):  # the user should see the error of the submission instead
            tracker.delete()
        raise
