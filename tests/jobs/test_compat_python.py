"""The private names of Python and torch that jobs needs still exist: a test fails with what would break.

What the functions do, tests/jobs/ranks/script/test_forked_script.py shows with real ranks.
"""

import atexit
import multiprocessing
import runpy
import sys
import threading

import pytest
import torch

from jobs import compat

STARTS_PROCESSES = compat.functions_that_start_processes()


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (runpy, "_run_module_as_main", "`-m MODULE` could not be the script of a rank"),
        (threading, "_shutdown", "a rank would end before its threads"),
        (atexit, "_run_exitfuncs", "a rank would leave out what its script has registered with atexit"),
        (multiprocessing.current_process(), "_identity", "a rank would not look like a main process"),
        (multiprocessing.current_process(), "_parent_pid", "a rank would not look like a main process"),
        (multiprocessing.process, "_parent_process", "a rank would not look like a main process"),
        (threading.main_thread(), "_set_native_id", "a rank would have the thread id of its wrapper"),
        *((owner, name, "Slurm's signals would end helper processes") for owner, name in STARTS_PROCESSES),
        (torch.cuda, "_is_in_bad_fork", "ranks that cannot use the GPUs would be forked"),
    ],
)
def test_python_and_torch_still_have_the_name(owner: object, name: str, use: str) -> None:
    versions = f"Python {sys.version.split()[0]} or torch {torch.__version__}"
    assert hasattr(owner, name), f"{versions} lacks {name}: {use} (jobs/compat.py)"


def test_process_that_is_no_fork_has_queried_nothing() -> None:
    assert not compat.has_queried_gpus_before_the_fork()
