"""The login node's side of Torchrelay: a room or file for each verb, the Python API, and the base of all packages.

Without torch and pandas, which only `hpc report` imports, a verb answers in a fraction of a second. Nodes and ranks
import `hpc.core` through this file, too: so the API (`hpc.api`) is imported when it is first used.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc.api import Run, Runs, ScriptRun, TorchrelayError, TrainingRun, UserError, find_run, runs, submit

__all__ = ["Run", "Runs", "ScriptRun", "TorchrelayError", "TrainingRun", "UserError", "find_run", "runs", "submit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpc.api"), name)


def _prepare_verb() -> None:
    """For `python -m hpc.VERB`: look for our packages where this file is, and for what they need."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Python looks in the current directory first, where a user may have a package `training` or `jobs`.
    if sys.path[0] == os.getcwd() != top:
        del sys.path[0]
    try:
        importlib.import_module("tyro")
    except ModuleNotFoundError:
        activate = os.path.join(top, ".venv/bin/activate")
        advice = f"source {activate}" if os.path.exists(activate) else f"{sys.executable} -m pip install -e {top}"
        print(f"torchrelay is not installed for {sys.executable}: type {advice}", file=sys.stderr)
        sys.exit(2)


# While Python looks for the module that it is to run, `-m` stands in the place of its file.
if sys.argv[:1] == ["-m"] and sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")[0] == __name__:
    _prepare_verb()
