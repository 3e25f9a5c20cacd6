"""torchrun with our rendezvous, and a faster start and exit: a script in place of `python -m torch.distributed.run`.

Runs once per node and round. With `--run-path`, the ranks are forks of this process, which imports what they need once
per node instead of once per rank, and not again for a rank that replaces a failed one.

Garbage collection takes a quarter of a second of the imports' 1.5 s and finds nothing. At exit Python would spend half
a second on freeing torch's modules, which may be time of the grace period.
"""

import gc

if __name__ == "__main__":
    gc.disable()

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torch.numa.binding import AffinityMode

# Look here before PYTHONPATH: a user's code may have a package of the same name.
sys.path.insert(0, str(Path(__file__).parents[2]))
from hpc.base.environment import PRELOAD, SECRET
from hpc.base.errors import EXIT_BAD_NODE
from hpc.base.kernel import adopt_orphans, end_children
from training.runtime.compat import end_ranks_within, run_exit_functions
from training.runtime.node_rendezvous import BACKEND, NodeRendezvous

# A user's script, in a fork, must find its own packages.
del sys.path[0]

# If one rank has died, the others hang in a collective and do not end on SIGTERM: torchrun would give them 30 s. If
# ranks can still save, the agent asks them to before.
_END_SECONDS = 1


def end_left_processes() -> None:
    """End the processes that the ranks left behind, and return when none exists; exit if some cannot be killed.

    torchrun waits only for the wrappers. A rank exists, and keeps its GPU, until the kernel has freed its memory.
    """
    if left := end_children():
        with contextlib.suppress(OSError):  # a full disk
            print(f"processes {left} of ranks could not be killed", flush=True)
        os._exit(EXIT_BAD_NODE)


def preload(names: Iterable[str]) -> None:
    """Import what a rank needs. A name is `MODULE`, or `MODULE:FUNCTION` if a function is to be called, too.

    No module or function may start threads or touch the GPUs, because ranks are forks of this process.
    """
    for name in names:
        module, _, function = name.partition(":")
        # A rank that needs a missing or broken module reports it.
        with contextlib.suppress(Exception):
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()


@record
def launch() -> None:
    """Do what torchrun's `main` does, but do not query the GPUs: forks of a process that queried them cannot use any.

    torch counts the GPUs to choose a NUMA binding if the launch names none. Naming one here, and removing it before
    anything is bound, prevents that.
    """
    arguments = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]  # torch's own
    arguments.numa_binding = AffinityMode.NODE.value
    config, program, words = config_from_args(arguments)
    config.numa_options = None
    elastic_launch(config, program)(*words)


def run() -> int:
    """Run torchrun, and return its exit code."""
    preload(filter(None, os.environ.pop(PRELOAD, "").split(",")))
    gc.freeze()
    gc.enable()
    # The ranks, and what they run and log, need not know the secret.
    secret = os.environ.pop(SECRET)

    def create(parameters: RendezvousParameters) -> NodeRendezvous:
        return NodeRendezvous(parameters, secret)

    rendezvous_handler_registry.register(BACKEND, create)
    adopt_orphans()
    end_ranks_within(_END_SECONDS, end_left_processes)
    try:
        launch()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # the interpreter would print it, too
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = run()
    # os._exit would skip this clean-up, such as of temporary directories.
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
