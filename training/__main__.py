"""`python -m training`: one rank of a training, under torchrun or alone."""

import time

from training import stop

# The first things of all: importing torch takes seconds, and a signal in them must not end the rank unsaved.
_STARTED = time.monotonic()
stop.install()

import os  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import tyro  # noqa: E402

from hpc.errors import TorchrelayError, UserError  # noqa: E402
from hpc.rundir import RunDir  # noqa: E402
from training.config import TrainConfig, check_model  # noqa: E402
from training.fault import parse_fault  # noqa: E402
from training.job import Job  # noqa: E402

_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train an image classifier with all ranks that torchrun started, or alone.

    Resumes from the newest checkpoint in the run directory. SIGTERM and SIGUSR2 make it save and stop.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    run_dir: Path = Path("runs/standalone")
    """The directory of everything that the run writes."""
    attempt: int = 1
    """The number of this attempt at the run."""
    fault: str = ""
    """For tests: POINT@STEP:RANK, where to die (training.fault)."""


def main() -> int:
    """Parse, train, and turn errors into one line and an exit code."""
    if not sys.stdout.isatty():
        # A log that is read while it is written needs whole lines at once.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    leads = os.environ.get("RANK", "0") == "0"
    try:
        arguments = tyro.cli(Arguments, prog="python -m training", console_outputs=leads)
        check_model(arguments.train.model)
        return _train(arguments)
    except UserError as error:
        if leads:
            _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        stop.ignore()
        _finish_output()


def _finish_output() -> None:
    """Let go of output that a full disk does not take: it would turn a good exit code into another one."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _train(arguments: Arguments) -> int:
    # cuBLAS is repeatable only with a fixed workspace, and reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # After the user's simplest mistakes: these imports take seconds.
    from training.distributed import SharedError, place_from  # noqa: PLC0415
    from training.launch import launch  # noqa: PLC0415

    place = place_from(os.environ)
    run_dir = RunDir(arguments.run_dir.expanduser().absolute())
    fault = parse_fault(arguments.fault)
    job = Job(config=arguments.train, run_dir=run_dir, attempt=arguments.attempt, started=_STARTED, fault=fault)
    try:
        launch(job, place)
    except TorchrelayError as error:
        if place.leads or not isinstance(error, SharedError):
            _complain(error)
        return error.exit_code
    return 0


def _complain(error: TorchrelayError) -> None:
    """Print the one line. An error of a loader worker comes with its traceback, the message at the end."""
    line = str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
    print(f"error: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # All is written. Python would take torch apart module by module: a second of every rank, in the grace period.
    os._exit(code)
