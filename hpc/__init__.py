"""The login node's side of Torchrelay: a room or file for each verb, the Python API, and the base of all packages.

Without torch and pandas, which only `hpc report` imports, a verb answers in a fraction of a second. Nodes and ranks
import `hpc.core` through this file, too: so the API (`hpc.api`) is imported when it is first used.
"""

import contextlib
import importlib
import itertools
import os
import re
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
    """Let `python -m hpc.VERB` import our packages, not those of a user. Exit if this Python cannot run them."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Python searches the current directory first, where a user may have a package `training` or `jobs`.
    with contextlib.suppress(FileNotFoundError):  # the directory was deleted
        if sys.path[0] == os.getcwd() != top:
            del sys.path[0]
    if tuple(sys.version_info) < (3, 11):
        found = ".".join(map(str, sys.version_info[:2]))
        print(f"torchrelay needs Python 3.11 or newer, and {sys.executable} is Python {found}", file=sys.stderr)
        sys.exit(2)
    try:
        importlib.import_module("tyro")
    except ModuleNotFoundError:
        activate = os.path.join(top, ".venv/bin/activate")
        advice = f"source {activate}" if os.path.exists(activate) else f"{sys.executable} -m pip install -e {top}"
        print(f"torchrelay is not installed for {sys.executable}: type {advice}", file=sys.stderr)
        sys.exit(2)


def _module_to_run() -> str:
    """Return the module that `python -m`, or `-um`, is looking for; empty later, when `-m` is not in `sys.argv`."""
    words = sys.orig_argv if sys.argv[:1] == ["-m"] else []
    pairs = itertools.pairwise(words)
    return next((module for flag, module in pairs if re.fullmatch("-[a-zA-Z]*m", flag)), "")


if _module_to_run().partition(".")[0] == __name__:
    _prepare_verb()
