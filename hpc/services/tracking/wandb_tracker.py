"""A tracker for Weights & Biases. Runs on a compute node and on the login node."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import wandb
from wandb.errors import Error

from hpc.base.errors import UserError
from hpc.run.events.history import Outcome
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.tracking.tracker import PROJECT, Point, TrackingError, run_id, settings_of

# Prefix of the last step of each series in W&B's summary. A process that resumes the run gets this summary.
_SENT = "sent/"


class WandbTracker:
    """A run at W&B or, offline, a directory `tracking/wandb/offline-run-*` with the whole run for `wandb sync`."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self.check()
        is_offline = os.environ.get("WANDB_MODE") == "offline"
        # Online, the directory is only a buffer.
        self._buffer = None if is_offline else tempfile.TemporaryDirectory(prefix="torchrelay-wandb-")
        if is_offline:
            # A script's own wandb.init() writes to `wandb` in the run directory, under the same id.
            run.tracking.mkdir(exist_ok=True)
            for earlier in run.tracking.glob("wandb/offline-run-*"):
                shutil.rmtree(earlier)
        settings = wandb.Settings(
            # The sending process has neither the output nor the GPUs of the run.
            console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True,
            disable_job_creation=True, silent=True, init_timeout=60.0,
            reinit="create_new",  # hpc sync has several runs open; by default, init() would return the first one again
        )  # fmt: skip
        with _errors():
            self._run = wandb.init(
                id=run_id(spec), resume="allow", name=run.name, settings=settings,
                project=os.environ.get("WANDB_PROJECT", PROJECT), config=settings_of(run, spec),
                dir=self._buffer.name if self._buffer else str(run.tracking), allow_val_change=True,
            )  # fmt: skip
            # The axis is our own step: evaluations come later than the training's lines of the same step.
            self._run.define_metric("*", step_metric="step")
            self._run.define_metric("step", hidden=True)
            self._run.define_metric(f"{_SENT}*", hidden=True)
        summary = dict(self._run.summary).items()
        self.sent = {name.removeprefix(_SENT): int(step) for name, step in summary if name.startswith(_SENT)}
        self.url: str | None = str(Path(self._run.dir).parent) if is_offline else self._run.url

    @staticmethod
    def check() -> None:
        """Raise UserError if W&B is disabled, or its key is missing or refused. May ask W&B's server."""
        mode = os.environ.get("WANDB_MODE")
        if mode == "disabled":
            raise UserError("WANDB_MODE is disabled, so nothing can be sent to Weights & Biases: unset it")
        try:
            has_key = mode == "offline" or wandb.login(prompt=False)
        except (Error, ValueError) as error:
            raise UserError(f"Weights & Biases refuses its key or its settings ({error}): type wandb login") from error
        if not has_key:
            raise UserError("Weights & Biases needs your key: type wandb login, or set WANDB_API_KEY")

    def send(self, points: Sequence[Point]) -> None:
        """Hand the points to W&B's own process, which sends them in the background."""
        for point in points:
            self.sent[point.series] = point.step
            line = {"step": point.step, f"{_SENT}{point.series}": point.step, **point.values}
            self._run.log(line if point.time is None else {**line, "_timestamp": point.time})

    def close(self, outcome: Outcome | None) -> None:
        """Wait until all points are sent. Without an outcome, W&B shows the run as preempted until it is resumed."""
        with _errors():
            if outcome is None:
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if outcome == "completed" else 1)
        if self._buffer:
            self._buffer.cleanup()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (Error, OSError) as error:
        raise TrackingError(str(error)) from error
