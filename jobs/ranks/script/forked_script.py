"""Runs a user's script or module as a rank, in the state in which plain torchrun would have started it.

Runs on compute nodes, in the process of the rank, which is a fork of torchrun if possible. torchrun has imported torch
and other modules that the script imports (training.runtime.__main__), so that a rank that replaces a failed one
starts in a second.
"""

import builtins
import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hpc.base.environment import HEARTBEAT
from hpc.base.kernel import keep_freed_memory
from jobs.compat import end_threads_and_run_exit_functions, leave_multiprocessing, run_module_as_main
from jobs.ranks.script.attached_callback import attach_callbacks
from jobs.ranks.script.step_counter import count_steps

_ROOT = str(Path(__file__).parents[3])
_OURS = frozenset({"hpc", "jobs", "torchrelay", "training"})
# In a Python of its own, glibc keeps up to this many freed bytes once large tensors have been freed. In a fork it did
# not (glibc 2.36): a rank on CPUs had 9,000 page faults a step instead of 10, and made up to 20 % fewer steps.
_FREED_BYTES = 64 * 2**20


def run_script(program: Sequence[str]) -> None:
    """Run `FILE.py ARGS...` or `-m MODULE ARGS...`, and end this process as Python would end."""
    _become_main_process(program)
    if heartbeat := os.environ.get(HEARTBEAT):
        count_steps(heartbeat, int(os.environ["RANK"]))
        attach_callbacks()
    code = 1
    try:
        if program[0] == "-m":
            run_module_as_main(program[1])
        else:
            _run_file(program[0])
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001  # the interpreter would print it, too
        trace = _own_part(error.__traceback__)
        # Before 3.13, Python itself prints no source lines of modules in an archive, such as torchrelay's.
        show = traceback.print_exception if sys.excepthook is sys.__excepthook__ else sys.excepthook
        show(type(error), error.with_traceback(trace), trace)
    # Do only this part of the interpreter's exit: freeing torch's modules as well would take half a second.
    end_threads_and_run_exit_functions()
    # The reader of stdout or stderr may have gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _become_main_process(program: Sequence[str]) -> None:
    """Undo all differences between this process and a Python that was started for the program."""
    is_module = program[0] == "-m"
    sys.argv = ["-m", *program[2:]] if is_module else list(program)
    sys.orig_argv = [sys.executable, "-u", *program]
    # Add `__mp_main__`, too: the child processes of multiprocessing use that name for the main module.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    # jobs.ranks.__main__ has inserted _ROOT. Python has inserted no script's directory, because torchrun runs with -P.
    sys.path.remove(_ROOT)
    # As Python does, take the directory of the file to which a link leads.
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program[0]).resolve().parent))
    # Forget our packages: the user's code may have packages of the same names.
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    # As with `python -u`, the output of a rank is in its log at once, even if the rank is killed.
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, f"__{name}__")
        raw = io.FileIO(descriptor, mode, closefd=False)
        binary: Any = io.BufferedReader(raw) if mode == "r" else raw
        text: Any = io.TextIOWrapper(binary, encoding=before.encoding, errors=before.errors, write_through=mode == "w")
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    leave_multiprocessing()
    keep_freed_memory(_FREED_BYTES)
    # Python reseeds its own generator after a fork. The generators of numpy and torch would be the same on all ranks.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _run_file(path: str) -> None:
    """Execute a script in the main module, which stays after the script's end because its threads may need it."""
    main = sys.modules["__main__"]
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102


def _exit_code(code: object) -> int:
    """Return the exit code for the argument of SystemExit; print the argument, as Python does, if it is a message."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's script."""
    ours = (run_script, run_module_as_main)
    skipped = {runpy.__file__, "<frozen runpy>", *(function.__code__.co_filename for function in ours)}
    while trace is not None and trace.tb_frame.f_code.co_filename in skipped:
        trace = trace.tb_next
    return trace
