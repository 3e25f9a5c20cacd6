"""`python -m training`: one rank of a training, under torchrun or alone."""

import faulthandler
import gc
import time

from training.runtime import signals

# The first things of all: importing torch takes seconds, and a signal in them must not end the rank unsaved. A rank
# that hangs is sent SIGABRT: it prints the stacks of its threads and dies.
_STARTED = time.monotonic()
signals.install()
faulthandler.enable(all_threads=True)
if __name__ == "__main__":
    # Imports make objects by the million and no garbage: looking for it takes a sixth of their time
    # (training.engine.launch).
    gc.disable()

import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

import tyro  # noqa: E402

from hpc.core.errors import TorchrelayError, UserError  # noqa: E402
from hpc.core.nodedir import NodeDir  # noqa: E402
from hpc.core.rundir import RunDir  # noqa: E402
from training.config.config_file import flag_names, with_config  # noqa: E402
from training.config.model_names import check_model  # noqa: E402
from training.config.train_config import RecipeName, TrainConfig  # noqa: E402
from training.runtime.fault_injection import NO_FAULT, Fault, parse_fault  # noqa: E402
from training.runtime.heartbeat import Heartbeat  # noqa: E402
from training.runtime.rank_info import RankInfo, rank_info_from  # noqa: E402
from training.runtime.run_context import RunContext  # noqa: E402

_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train an image classifier with all ranks that torchrun started, or alone.

    Resumes from the newest checkpoint in the run directory. SIGTERM and SIGUSR2 make it save and stop.
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    """A name of `training.config.recipe.recipes`."""
    config: Path | None = None
    """YAML file with flags and their values; it wins over --recipe, and flags on the command line over both."""
    run_dir: Path = Path("runs/standalone")
    """The directory of everything that the run writes."""
    attempt: int = 1
    """The number of this attempt at the run."""
    node_dir: Path | None = None
    """A directory in this node's memory, for what outlives the processes: snapshots of the state, signs of life."""
    fault: str = ""
    """For tests: POINT@STEP:RANK, what is to go wrong (training.runtime.fault_injection); or TORCHRELAY_FAULT in
    the environment.
    """


def main() -> int:
    """Parse, train, and turn errors into one line and an exit code.

    A crash ends the process at once: whatever would be taken apart in good order waits for workers, threads or ranks.
    """
    if not sys.stdout.isatty():
        # A log that is read while it is written needs whole lines at once.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    leads = os.environ.get("RANK", "0") == "0"
    try:
        argv = with_config(sys.argv[1:], flag_names(TrainConfig))
        arguments = tyro.cli(TrainOptions, args=argv, prog="python -m training", console_outputs=leads)
        check_model(arguments.train.model)
        return _train(arguments)
    except UserError as error:
        if leads:
            _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001  # all that nobody has foreseen
        _print_crash(error)
        _finish_output()
        leave(1)
    finally:
        signals.ignore()
        _finish_output()


def _finish_output() -> None:
    """Let go of output that a full disk does not take: it would turn a good exit code into another one."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _train(arguments: TrainOptions) -> int:
    place = rank_info_from(os.environ)
    node_dir = NodeDir(arguments.node_dir.absolute()) if arguments.node_dir else None
    heartbeat = Heartbeat(node_dir.heartbeat(place.local_rank) if node_dir else None, place.rank)
    heartbeat.beat("start")
    fault = _fault(arguments.fault or os.environ.get("TORCHRELAY_FAULT", ""), place)
    # cuBLAS is repeatable only with a fixed workspace, and reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # After the user's simplest mistakes: these imports take seconds.
    from training.engine.launch import launch  # noqa: PLC0415
    from training.runtime.process_group import SharedError  # noqa: PLC0415

    run_dir = RunDir(arguments.run_dir.expanduser().absolute())
    context = RunContext(
        config=arguments.train,
        run_dir=run_dir,
        attempt=arguments.attempt,
        started=_STARTED,
        fault=fault,
        node_dir=node_dir,
        heartbeat=heartbeat,
        recipe=arguments.recipe,
    )
    try:
        launch(context, place)
    except TorchrelayError as error:
        if place.is_rank_zero or not isinstance(error, SharedError):
            _complain(error)
        return error.exit_code
    return 0


def _fault(text: str, place: RankInfo) -> Fault:
    """The failure that is to come about. torchrun starts the ranks with the same flags again after it has."""
    fault = parse_fault(text)
    return NO_FAULT if place.restarts and not fault.always else fault


def _complain(error: TorchrelayError) -> None:
    """Print the one line. An error of a loader worker comes with its traceback, the message at the end."""
    line = str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
    print(f"error: {line}", file=sys.stderr, flush=True)


def _print_crash(error: Exception) -> None:
    """The traceback, and the line that tells most at the end: people and the node's agent read the last one."""
    traceback.print_exc()
    first, *more = str(error).strip().splitlines() or [""]
    if more:
        # An error of a loader worker comes with its own traceback, the message at the end.
        line = more[-1] if "Traceback" in str(error) else f"{type(error).__qualname__}: {first}"
        print(line, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process; all is written.

    Python would take torch apart module by module: a second of every rank, in the grace period.
    """
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
