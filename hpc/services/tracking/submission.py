"""Prepares `hpc submit --tracker`: refuses a tracker that is not set up, and makes the run at MLflow. Login node."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpc.base.errors import TorchrelayError, need_package
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service
from hpc.services.tracking.tracker import TITLES, TrackingError


def check_ready(service: Service) -> None:
    """Raise UserError if the package, the address or the key of a tracker is missing.

    Only W&B's check of the key may contact a server.
    """
    need_package(service, service, TITLES[service])
    if service == "wandb":
        from hpc.services.tracking.wandb_tracker import check_login  # noqa: PLC0415 - takes a second

        check_login()
    else:
        from hpc.services.tracking.mlflow_tracker import check_address  # noqa: PLC0415 - takes a second

        check_address()


@contextmanager
def at_trackers(run: RunDir, spec: RunSpec) -> Iterator[RunSpec]:
    """Make the run at MLflow if its flags name MLflow, and yield the spec with the run's id there.

    The login node makes it, as nodes may not reach the server. A failed submission deletes it. Raises TrackingError.
    """
    if "mlflow" not in spec.tracker:
        yield spec
        return
    from hpc.services.tracking import mlflow_tracker  # noqa: PLC0415 - takes a second

    mlflow_run = mlflow_tracker.create_run(run, spec)
    try:
        yield dataclasses.replace(spec, mlflow_run=mlflow_run)
    except (TorchrelayError, OSError):
        with suppress(TrackingError):  # the user should see the error of the submission instead
            mlflow_tracker.delete_run(mlflow_run)
        raise
