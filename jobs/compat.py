"""Functions that use private names of Python or torch. Each names the versions whose source it was checked against.

tests/jobs/test_compat_python.py fails for each name that a new version lacks. Runs on compute nodes, also in a user's
Python. Slow imports are inside the functions, so that a process wrapper starts fast.
"""
# ruff: noqa: PLC0415

import os
import sys
from typing import Any


def run_module_as_main(name: str) -> None:
    """Run a module as `python -m` does; `runpy.run_module` would drop its variables. Checked against Python 3.11."""
    import runpy

    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def end_threads_and_run_exit_functions() -> None:
    """Wait for threads and run exit functions, as Python does before it frees modules. Checked against Python 3.11.

    One of these functions terminates the loader workers that are left, which kills them (jobs.ranks.helper_processes).
    torch's handler of SIGCHLD would raise an error, so it is removed. Checked against torch 2.15.
    """
    import atexit
    import signal
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit._run_exitfuncs()


def leave_multiprocessing() -> None:
    """Undo the changes that multiprocessing made when torchrun forked this process. Checked against Python 3.11.

    A script may print only in a process named MainProcess, and may choose the start method of its own processes.
    """
    import multiprocessing
    import threading

    process: Any = multiprocessing.current_process()
    process.name, process.authkey = "MainProcess", os.urandom(32)
    process._identity, process._parent_pid = (), None
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # it was the wrapper's


def functions_that_start_processes() -> list[tuple[Any, str]]:
    """Return each function with which Python, and torch if it is imported, start processes: its owner and its name.

    Checked against Python 3.11, where multiprocessing's are not public: `spawnv_passfds` starts the processes of
    `spawn`, the server of `forkserver`, and the resource tracker. `ensure_running` afterwards unblocks SIGTERM in its
    caller, which may be a loader worker. Checked against torch 2.15: with the sharing strategy `file_system`,
    `_share_filename_cpu_` starts the process that owns the shared files.
    """
    import subprocess
    from multiprocessing import resource_tracker, util

    names = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")
    tracker, torch = resource_tracker.ResourceTracker, sys.modules.get("torch")
    return [
        *((os, name) for name in names),
        (subprocess.Popen, "__init__"), (util, "spawnv_passfds"), (tracker, "ensure_running"),
        *([(torch.UntypedStorage, "_share_filename_cpu_")] if torch else []),
    ]  # fmt: skip


def has_queried_gpus_before_the_fork() -> bool:
    """Return whether torch, if imported, says that this fork cannot use GPUs. Checked against torch 2.11 and 2.15."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())
