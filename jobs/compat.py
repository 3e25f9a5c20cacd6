"""The private names of Python and torch that jobs needs, each in a function, with the version in which it was read.

tests/jobs/test_compat_python.py says which one a new version lacks. Runs on compute nodes, in a user's Python too. It
imports nothing at its top that a process wrapper would have to wait for.
"""
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Callable
from typing import Any


def run_module_as_main(name: str) -> None:
    """Run a module as `python -m` does. Read in Python 3.11; `runpy.run_module` frees the module when it returns."""
    import runpy

    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def end_threads_and_run_exit_functions() -> None:
    """Do what the interpreter does at its end, before it frees all modules. Read in Python 3.11."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def leave_multiprocessing() -> None:
    """Undo what multiprocessing, with which torchrun forked this process, changes in each child. Read in Python 3.11.

    Programs look at the name of their process to print only once, and choose how their own processes start.
    """
    import multiprocessing
    import threading

    process: Any = multiprocessing.current_process()
    process.name, process.authkey = "MainProcess", os.urandom(32)
    process._identity, process._parent_pid = (), None
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it was the wrapper's


def process_classes() -> tuple[Any, Any]:
    """Return the classes whose `terminate` ends a child of multiprocessing (by any start method), and of subprocess.

    Read in Python 3.11; only the second is public.
    """
    import subprocess
    from multiprocessing import popen_fork

    return popen_fork.Popen, subprocess.Popen


def check_tar_headers(kind: Any, check: Callable[[Any], None]) -> None:
    """Make `kind`, a subclass of TarInfo, call `check` on each header before tarfile reads the data that it announces.

    Read in Python 3.11 to 3.14, where a comment names `_proc_member` as the method to override. The tarfile of 3.13 and
    3.14 no longer calls `frombuf`, which is public.
    """
    process = kind._proc_member

    def checked(header: Any, archive: Any) -> Any:
        check(header)
        return process(header, archive)

    kind._proc_member = checked


def has_queried_gpus_before_the_fork() -> bool:
    """Return whether torch knows that this fork cannot use GPUs; False if not imported. Read in torch 2.11 and 2.15."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())
