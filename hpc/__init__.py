"""The login node's side of Torchrelay: the commands, the Python API, their libraries, and the base of all packages.

Commands start in a fraction of a second: they never import torch, and import pandas only for HTML pages. The API
(`hpc.commands.api`) is imported only at its first use, because agents and ranks also import this file, for `hpc.base`.
"""

import contextlib
import importlib.util
import os
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc.commands.api import Run, ScriptRun, TorchrelayError, TrainingRun, UserError, find_run, runs, submit

__all__ = ["Run", "ScriptRun", "TorchrelayError", "TrainingRun", "UserError", "find_run", "runs", "submit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpc.commands.api"), name)


def _prepare_verb() -> None:
    """Let `python -m hpc` import our packages, not a user's `jobs` or `training`. Exit if Python cannot run hpc."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Python searches the current directory first.
    with contextlib.suppress(FileNotFoundError):  # the current directory was deleted
        if sys.path[0] == os.getcwd() != top:
            del sys.path[0]
    if tuple(sys.version_info) < (3, 11):
        found = ".".join(map(str, sys.version_info[:2]))
        print(f"torchrelay needs Python 3.11 or newer, and {sys.executable} is Python {found}", file=sys.stderr)
        sys.exit(2)
    if not importlib.util.find_spec("submitit"):  # which only an installation brings
        activate = os.path.join(top, ".venv/bin/activate")
        advice = f"source {activate}" if os.path.exists(activate) else f"{sys.executable} -m pip install -e {top}"
        print(f"torchrelay is not installed for {sys.executable}: type {advice}", file=sys.stderr)
        sys.exit(2)


def _is_file(path: str) -> bool:
    """Return whether there is a file with this path, which may be in a run's archive of our packages."""
    try:
        __spec__.loader.get_data(path)  # type: ignore[union-attr]  # of a file or an archive
    except OSError:
        return False
    return True


def _start() -> None:
    """Replace `python -m hpc.VERB` by `python -m hpc VERB`. Prepare `python -m hpc` and modules that are not verbs.

    The verb needs a new program (exec): while Python imports `hpc` here, the verb's threads would wait for this import.
    """
    arguments = sys.argv[1:]
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    # The module may stand in one word with the flag, as in -umhpc.status.
    found = re.fullmatch(rf"(-[a-zA-Z]*?m)?{__name__}(\..+)?", words[-1]) if words else None
    if not found:
        return
    flag, verb = found[1], (found[2] or "").rpartition(".")[2]
    file = os.path.join(os.path.dirname(__file__), *(found[2] or "").split("."))
    runs = any(map(_is_file, (f"{file}.py", os.path.join(file, "__main__.py"))))
    if verb and (not runs or found[2].startswith(".commands.")):
        os.execv(sys.executable, [sys.executable, *words[:-1], *filter(None, [flag]), __name__, verb, *arguments])  # noqa: S606
    _prepare_verb()


if sys.argv[:1] == ["-m"]:  # Python sets this only while it looks for the module to run
    _start()
