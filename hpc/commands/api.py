"""The Python API: `import hpc`. Runs on the login node, in a script or a notebook, without torch.

    run = hpc.submit(hpc.TrainingRun(data="/shared/pets", model="resnet50", epochs=90, nodes=2, gpus_per_node=4))
    run.wait()
    run.metrics().plot("step", "loss")

Each call does what the command of the same name does. Flags, defaults and errors are the same: `lr=0.1` is `--lr 0.1`.
"""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpc.base.errors import TorchrelayError, UserError
from hpc.commands import cli
from hpc.commands.runs import fork
from hpc.programs.program_kinds import ClassifierRequest
from hpc.programs.script_flags import ScriptRequest
from hpc.run.rundir import RunDir
from hpc.run.spec import Network, Notification, Recovery, Resources
from hpc.slurm import client as slurm
from hpc.slurm.cancellation import cancel_run
from hpc.status.log_reader import LogReader
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL
from hpc.submissions import resumed_run
from hpc.submissions.new_run import start_run
from hpc.submissions.options import RunFlags, SubmitOptions, completed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "ScriptRun", "TorchrelayError", "TrainingRun", "UserError", "find_run", "runs", "submit"]

_WAIT_SECONDS = 2.0


class _Given:
    """Records which flags the caller gave, because `submit` takes all others from the user's defaults."""

    given: Mapping[str, Any]

    def __new__(cls, **given: Any) -> Self:
        """Create the object, and record the flags that the caller gave."""
        made = super().__new__(cls)
        object.__setattr__(made, "given", given)
        return made


@dataclass(frozen=True, kw_only=True)
class _RunRequest(_Given, RunFlags, Resources, Recovery, Network, Notification):
    # Python may give texts and numbers, as a command line does.
    nodes: int | str = 1  # type: ignore[assignment]
    gpus_per_node: int | str = 1  # type: ignore[assignment]
    mem: str | None = None  # type: ignore[assignment]
    time: str | None = None  # type: ignore[assignment]
    time_min: str | None = None  # type: ignore[assignment]
    hang_timeout: str = "auto"  # type: ignore[assignment]
    signal_before: str | None = None  # type: ignore[assignment]
    grace_period: str | None = None  # type: ignore[assignment]
    port_range: str | None = None  # type: ignore[assignment]
    stage_keep: str = "7d"  # type: ignore[assignment]
    stage_timeout: str = "5m"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Skip the base classes' checks: `submit` makes them after it has added a recipe and the user's defaults."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(_RunRequest, ClassifierRequest):
    """A training to submit: the flags of `hpc submit` as arguments."""


@dataclass(frozen=True, kw_only=True)
class ScriptRun(_RunRequest, ScriptRequest):
    """A torchrun script of your own to submit: `ScriptRun(command="train.py --epochs 3", nodes=2)`."""

    command: str | Sequence[str]
    """The script and its arguments, as text or as a list."""


class Run:
    """Represents a submitted run, identified by its directory."""

    def __init__(self, directory: Path) -> None:
        self._run = RunDir(directory)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._run.name

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._run.path

    def status(self) -> dict[str, Any]:
        """Return the run's entry in `hpc status --json` (docs/json.schema.json); unknown values are None."""
        return StatusCache().summary(self._run).document()

    def wait(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Wait, over all attempts, until the run is completed, failed or cancelled. Returns its status.

        Raises:
            TimeoutError: the run has not ended in this time. It continues.
        """
        deadline, cache = None if timeout_seconds is None else time.monotonic() + timeout_seconds, StatusCache()
        while (status := cache.summary(self._run)).state not in TERMINAL:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name} is {status.state} after {timeout_seconds} s")
            time.sleep(_WAIT_SECONDS)
        return status.document()

    def metrics(self, name: str = "train") -> "pd.DataFrame":
        """Return `metrics/NAME.jsonl` (`train`, `eval` or your own) as a table with the last line of each step."""
        import pandas as pd  # noqa: PLC0415 - takes half a second

        from hpc.base.files import number_in, read_json_lines  # noqa: PLC0415

        records = read_json_lines(self._run.train_metrics.with_name(f"{name}.jsonl"))
        lines = [record for record in records if number_in(record, "step") is not None]
        keys = ["step", *(["split"] if any("split" in line for line in lines) else [])]
        table = pd.DataFrame(lines)
        return table if table.empty else table.drop_duplicates(keys, keep="last").sort_values(keys, ignore_index=True)

    def logs(self, rank: int | None = None, attempt: int | None = None) -> str:
        """Return the output of all ranks and node agents.

        With `rank` or `attempt`, return only the output of that rank, or of the ranks in that attempt.
        """
        lines = LogReader(self._run, rank, attempt).new_lines(ended=True)
        return "".join(f"{line['line']}\n" for line in lines)

    def cancel(self, *, final: bool = False) -> None:
        """Stop the run. `resume` can continue it, unless `final` is True.

        Raises:
            TorchrelayError: a job of the run may still be running.
        """
        cancel_run(cli.find_own_run(str(self.directory), self.directory.parent), self.status()["state"], final=final)

    def resume(self, **flags: Any) -> None:
        """Continue the run after `cancel` or a failure, or train it longer: `run.resume(epochs=200)`.

        Raises:
            UserError: the run has not ended, or a flag cannot change (use `fork`).
            TorchrelayError: Slurm refuses the job, or another process has resumed the run.
        """
        options = resumed_run.options_of(self._with(flags))
        slurm.adopt_environment(os.environ)
        resumed_run.resume_run(options)

    def fork(self, name: str, **flags: Any) -> "Run":
        """Start a new run from the newest checkpoint, with other flags: `run.fork("low", lr=0.01)`.

        Raises:
            UserError, TorchrelayError: as `submit`.
        """
        options = fork.options_of(self._with({"name": name, **flags}))
        slurm.adopt_environment(os.environ)
        return Run(fork.fork(options).run.path)

    def _with(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(self.directory), **_given(flags)}

    def report(self) -> Path:
        """Write the HTML page and the CSV tables of the run. Returns the path of the page."""
        from hpc.commands.runs.report import page_path, write_report  # noqa: PLC0415 - imports pandas and Bokeh

        path = page_path([self._run])
        write_report([self._run], path)
        return path

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


def submit(request: TrainingRun | ScriptRun) -> Run:
    """Check a run, make its directory and queue it, as `hpc submit` does.

    Raises:
        UserError: a flag is wrong, or Slurm refuses the job; no run is left behind.
        TorchrelayError: Slurm does not answer.
    """
    flags, script = dict(request.given), tuple[str, ...]()
    if isinstance(request, ScriptRun):
        command = flags.pop("command")
        script = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    options = completed(_given(flags), SubmitOptions, script)
    slurm.adopt_environment(os.environ)
    return Run(start_run(options).run.path)


def runs(runs_dir: str | Path | None = None) -> list[Run]:
    """Return all runs in a directory, the newest last. The default is the `--runs-dir` of the commands."""
    return [Run(run.path) for run in cli.all_runs(cli.runs_dir({"runs-dir": runs_dir}))]


def find_run(name: str, runs_dir: str | Path | None = None) -> Run:
    """Return the run with this path, or this name in `runs_dir` (default: as `runs`). Raises UserError if missing."""
    return Run(cli.find_run(name, cli.runs_dir({"runs-dir": runs_dir})).path)


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that have a value, by their names on the command line. Tuples become lists."""
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    return {name.replace("_", "-"): value for name, value in listed.items() if value is not None}
