"""A user's script or module as a rank that is a fork of torchrun: it finds what a Python of its own would have.

Runs on compute nodes, in the process of the rank. torchrun has imported torch and what else the script names
(training.runtime.torchrun_main), so that a rank that replaces a failed one starts in a second.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_ROOT = str(Path(__file__).parents[2])
_OURS = frozenset({"hpc", "jobs", "training"})


def run_script(program: Sequence[str]) -> None:
    """Run `FILE.py ARGS...` or `-m MODULE ARGS...`, and end this process as Python would end."""
    _become_main_process(program)
    code = 1
    try:
        if program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001  # the interpreter would print it, too
        trace = _own_part(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    # The interpreter would also take half a second to free torch's modules.
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public function
    atexit._run_exitfuncs()  # noqa: SLF001  # nor is there here
    # Their reader may have gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _become_main_process(program: Sequence[str]) -> None:
    """Undo what tells this process from one that has executed Python."""
    is_module = program[0] == "-m"
    sys.argv = list(program[1:] if is_module else program)
    # What the process wrapper has put there; torchrun's has no directory of a script (-P).
    sys.path.remove(_ROOT)
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program[0]).parent))
    # The user's code may have packages of the same names.
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    # As with `python -u`: what a rank prints is in its log at once, also if it is killed.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        raw = io.FileIO(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    # Programs ask for the name of the main process, to print once; torchrun has forked this one by multiprocessing.
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # noqa: SLF001  # there is no other way
    # Python's own random numbers differ after a fork. numpy's would be the same on all ranks.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _exit_code(code: object) -> int:
    """What the interpreter makes of the argument of SystemExit."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without what runs the script."""
    skipped = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in skipped:
        trace = trace.tb_next
    return trace
