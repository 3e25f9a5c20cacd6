"""`python -m training`: runs one rank of a training or an evaluation, under torchrun or alone.

Started by a node agent, it gets all flags that differ from their defaults. Started by hand, it adds flags from files.
"""

import faulthandler
import gc
import time

from torchrelay.progress_files import Heartbeat
from torchrelay.stop_signals import STOP_SIGNALS, signals

# Handle signals before all other imports: a signal during the import of torch, which takes seconds, must not end the
# rank unsaved. A rank that hangs gets SIGABRT; faulthandler then prints the stacks of its threads.
_STARTED = time.monotonic()
signals.install()
faulthandler.enable(all_threads=True)
if __name__ == "__main__":
    # Imports make millions of objects but no garbage: garbage collection would take a sixth of their time. `launch`
    # turns it on again.
    gc.disable()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from typing import NoReturn  # noqa: E402

from hpc.base import program  # noqa: E402
from hpc.base.environment import FAULT  # noqa: E402
from hpc.base.errors import TorchrelayError, UserError  # noqa: E402
from hpc.base.files import expanded  # noqa: E402
from hpc.run.nodedir import NodeDir  # noqa: E402
from hpc.run.rundir import RunDir  # noqa: E402
from training.config.command_line import TrainOptions, parse_flags, rank_options  # noqa: E402
from training.config.evaluation_task import EvaluationTask  # noqa: E402
from training.config.train_config import RankOptions  # noqa: E402
from training.runtime.fault_injection import NO_FAULT, parse_fault  # noqa: E402
from training.runtime.run_context import RankInfo, RunContext, rank_info_from  # noqa: E402


def main() -> int:
    """Train or evaluate, and return the exit code. An expected error is printed as one line.

    An unexpected exception ends the process at once: an orderly end would wait for workers, threads or other ranks.
    """
    # Write each line as soon as it is complete: people read the log while it grows. Paths may not be UTF-8.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # a TextIOWrapper
    rank = rank_info_from(os.environ)
    try:
        if "--resolved" in sys.argv[1:]:  # from a node agent (training.config.classifier_program)
            return _train(rank_options(sys.argv[1:]), rank)
        return _train(parse_flags(TrainOptions, sys.argv[1:], program.called("training")), rank)
    except UserError as error:
        if rank.is_rank_zero:
            _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return program.INTERRUPTED
    except Exception as error:  # noqa: BLE001  # a defect, here or in a library
        traceback.print_exc()
        first, *more = str(error).strip().splitlines() or [""]
        if more:
            # People and the node agent read the last line. The error of a loader worker contains a traceback, with the
            # message at its end.
            line = more[-1] if "Traceback" in str(error) else f"{type(error).__qualname__}: {first}"
            print(line, file=sys.stderr, flush=True)
        _flush_output()
        leave(1)
    finally:
        # Python removes its signal handlers at its shutdown. A signal would then kill this rank, whose work is done,
        # and torchrun would take that for a failure and restart all ranks.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _flush_output()


def _train(options: RankOptions, rank: RankInfo) -> int:
    node_dir = NodeDir(options.node_dir.absolute()) if options.node_dir else None
    heartbeat = Heartbeat(node_dir.heartbeat(rank.local_rank) if node_dir else None, rank.rank)
    heartbeat.beat("start")
    fault = parse_fault(options.fault or os.environ.get(FAULT, ""))
    if rank.restarts and not fault.always:
        fault = NO_FAULT  # after the fault, torchrun restarts the ranks with the same flags
    run_dir = RunDir(expanded(options.run_dir).absolute())
    context = RunContext(
        config=options.train,
        run_dir=run_dir,
        attempt=options.attempt,
        started=_STARTED,
        fault=fault,
        node_dir=node_dir,
        heartbeat=heartbeat,
        recipe=options.recipe,
        evaluation=EvaluationTask.load(run_dir.model),
    )
    # Import these after the checks of the flags, because the imports take seconds.
    from training.engine.launch import launch  # noqa: PLC0415
    from training.engine.loss_meter import DivergedError  # noqa: PLC0415
    from training.runtime.process_group import SharedError  # noqa: PLC0415

    try:
        launch(context, rank)
    except TorchrelayError as error:
        if rank.is_rank_zero or not isinstance(error, SharedError | DivergedError):
            _print_error(error)
        return error.exit_code
    return 0


def _print_error(error: TorchrelayError) -> None:
    """Print only the last line of an error: a loader worker's error is a traceback that ends with the message."""
    line = str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
    print(f"error: {line}", file=sys.stderr, flush=True)


def _flush_output() -> None:
    """Flush stdout. Discard output that a full disk refuses, because an error at exit would change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> NoReturn:
    """Exit without Python's shutdown, which would spend a second of the grace period on freeing torch."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
