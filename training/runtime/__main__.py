"""Runs torchrun like `python -m torch.distributed.run`, but with our rendezvous, and with a faster start and exit.

Runs once per node and round, by the path of this directory, which may be in a run's archive of our packages. If its
first argument is `standby`, it does its imports, and then waits until its parent writes the arguments and the
environment into its stdin. With `--run-path`, the ranks are forks of this process. So their modules are imported once
per node instead of once per rank, and not again when the ranks are restarted.

Garbage collection is off during the imports: it takes a quarter of a second of their 1.5 s and finds nothing. The exit
does not free torch's modules: that takes half a second, which may be a part of the grace period.
"""

import gc
import signal
import sys

if __name__ == "__main__":
    del sys.path[0]  # this directory, whose modules are not to be found by short names
    gc.disable()
    if sys.argv[1:2] == ["standby"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing depends on this process yet

import contextlib
import importlib
import json
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

# Search this copy of torchrelay before PYTHONPATH: a user's code may have packages named `hpc` or `training`.
sys.path.insert(0, str(Path(__file__).parents[2]))
from hpc.base.environment import PARENT, PRELOAD, SECRET
from hpc.base.errors import EXIT_BAD_NODE
from hpc.base.kernel import adopt_orphans, end_children, name_process
from training.runtime.compat import (
    end_ranks_within,
    leave_signals_alone,
    log_failures_without_compiler,
    run_exit_functions,
)
from training.runtime.node_rendezvous import BACKEND, NodeRendezvous

# A user's script, which runs in a fork, must find its own packages first.
del sys.path[0]

# After a rank's death, the others hang in a collective and do not end on SIGTERM; torchrun would wait 30 s for them. If
# ranks can still save, the agent has asked them to save before.
_END_SECONDS = 1


def end_left_processes() -> None:
    """Kill the processes that the ranks left behind, and wait until they are gone. Exit if one cannot be killed.

    torchrun waits only for the ranks' wrappers, but a rank keeps its GPU until the kernel has freed the rank's memory.
    """
    if left := end_children():
        with contextlib.suppress(OSError):  # a full disk
            print(f"processes {left} of ranks could not be killed", flush=True)
        os._exit(EXIT_BAD_NODE)


def preload(names: Iterable[str]) -> None:
    """Import modules for the ranks. A name is `MODULE`, or `MODULE:FUNCTION` to call a function after the import.

    No module or function may start threads or use the GPUs, because ranks are forks of this process.
    """
    for name in names:
        module, _, function = name.partition(":")
        # If a module is missing or broken, the rank that needs it reports it.
        with contextlib.suppress(Exception):
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()


def await_arguments() -> None:
    """Take the arguments and the environment from stdin. Exit if the parent has ended, or needs no ranks."""
    order = sys.stdin.buffer.read()
    if not order:
        os._exit(0)
    fields = json.loads(order)
    sys.argv[1:] = fields["argv"]
    os.environ.clear()
    os.environ.update(fields["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor, not a file
        os.dup2(nothing.fileno(), sys.stdin.fileno())


@record
def launch() -> None:
    """Launch like torchrun's `main`, but without querying the GPUs: after a query, forks could not use them.

    torch counts the GPUs to choose a NUMA binding if the launch names none. So a binding is named here, and removed
    before it takes effect.
    """
    arguments = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]  # torch's own
    arguments.numa_binding = "node"
    config, program, words = config_from_args(arguments)
    name_process("torchrun", ["torchrun"], f"node {config.rdzv_configs['rank']}/{config.max_nodes}")
    config.numa_options = None
    # SIGTERM stays ignored, as inherited. When jobs.node_probe times out, its SIGINT ends torchrun in good order.
    config.signals_to_handle = "SIGINT"
    elastic_launch(config, program)(*words)


def run() -> int:
    """Run torchrun, and return its exit code."""
    is_standby = sys.argv[1:2] == ["standby"]
    if is_standby:
        name_process("torchrun", ["torchrun"], "standby")
    preload(filter(None, os.environ.get(PRELOAD, "").split(",")))
    gc.freeze()
    gc.enable()
    if is_standby:
        await_arguments()
    os.environ.pop(PRELOAD, None)
    # Hide the secret from the ranks, and from what they run and log.
    secret = os.environ.pop(SECRET)
    os.environ[PARENT] = str(os.getpid())

    def create(parameters: RendezvousParameters) -> NodeRendezvous:
        return NodeRendezvous(parameters, secret)

    rendezvous_handler_registry.register(BACKEND, create)
    adopt_orphans()
    end_ranks_within(_END_SECONDS, end_left_processes)
    leave_signals_alone()
    log_failures_without_compiler()
    try:
        launch()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # printed as by the interpreter
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = run()
    # os._exit would skip these functions, such as the removal of temporary directories.
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
