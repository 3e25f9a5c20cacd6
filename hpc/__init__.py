"""The login node's side of Torchrelay: a room or file for each verb, the Python API, and the base of all packages.

Without torch and pandas, which only `hpc report` imports, a verb answers in a fraction of a second. Nodes and ranks
import `hpc.core` through this file, too: so the API (`hpc.api`) is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc.api import Run, Runs, ScriptRun, TorchrelayError, TrainingRun, UserError, find_run, runs, submit

__all__ = ["Run", "Runs", "ScriptRun", "TorchrelayError", "TrainingRun", "UserError", "find_run", "runs", "submit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpc.api"), name)
