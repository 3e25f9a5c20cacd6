"""Defines `Program`, the part of a run's spec for the node agents, and reads the spec's file. Runs everywhere.

The agents run all programs in the same way. The differences between the classifier, a script, an evaluation and the
preflight are fields of `Program`, which `hpc submit` writes into the spec.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpc.base.errors import UserError
from hpc.run.causes import EXIT_CODES, Cause
from hpc.run.rundir import LIBRARY

LIBRARIES = (
    # Optimizers, DDP and many other parts of torch import this module at their first use.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""Modules of torch that almost every program imports sooner or later."""
BRACE = "{torchrelay_brace}"
"""The name for which the node writes `{`. Our own programs have it for each brace of a value that somebody typed."""
_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that torchrun runs as each rank, with the facts that the node agents need."""

    argv: tuple[str, ...]
    """The file, or `-m` and a module, then its arguments. The node replaces names in braces, such as {run_dir}."""
    built_in: str = ""
    """The program's kind if it ships with Torchrelay, such as `classifier`; empty for a user's own script."""
    import_path: tuple[str, ...] = ()
    """Directories below `{code}` or `{packages}` that come first on PYTHONPATH, where they replace our packages. If
    empty, the ranks have the PYTHONPATH of the agents."""
    isolated: bool = False
    """Whether a rank starts with none of our modules imported, as if Python had executed the program. torchrun then
    also preloads the modules that the program's source imports, if they are safe in a process that forks."""
    preload: tuple[str, ...] = ()
    """Modules that torchrun imports before it forks the ranks. For `MODULE:FUNCTION` it then calls the function."""
    exit_codes: Mapping[int, Cause] = field(default_factory=dict)
    """The causes by exit code. If empty, any exit code of a rank that was asked to stop means that it has saved."""
    reports_steps: bool = False
    """Whether ranks always report their steps, so that a failure before the first report is at step 0."""
    writes_result: bool = False
    """Whether the run is complete once `final/` has a result. If False, the run is complete when all ranks have exited
    with 0."""
    preflight: "Program | None" = None
    """The program that checks nodes before this program first runs on them; None if this program checks them itself."""


LIBRARY_PATH = f"{{packages}}/{LIBRARY}"
"""The entry of a program's import path with `torchrelay` alone."""

PREFLIGHT = Program(
    argv=("-m", "training.engine.preflight", "{run_dir}", "{attempt}"),
    import_path=("{packages}", LIBRARY_PATH),
    exit_codes=EXIT_CODES,
)
"""The program that checks nodes before a user's script first runs on them."""


def script_program(script: tuple[str, ...], top: str = ".") -> Program:
    """Return the program of a user's script: its file, or `-m` and a module, and its arguments.

    `top` is the top of the user's repository, relative to the run's `code/`.
    """
    code = "{code}" if top == "." else "{code}/" + top.replace("{", "{{").replace("}", "}}")
    path = (code, f"{code}/src", LIBRARY_PATH) if script[0] == "-m" else (code, LIBRARY_PATH)
    return Program(argv=script, import_path=path, isolated=True, preload=LIBRARIES, preflight=PREFLIGHT)


def read_spec(path: Path, part: Callable[[dict[str, Any]], _Part]) -> _Part:
    """Read the fields in a spec's file, and return what `part` makes of them.

    Raises:
        OSError: the storage does not answer.
        UserError: the file is not JSON, lacks a field, or has a field of another version.
    """
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): {path.parent} is damaged or not a run directory") from error
    try:
        return part(fields)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is damaged, or of another version of torchrelay ({error!r}): use the version that submitted the "
            "run, or submit the run again"
        ) from error
