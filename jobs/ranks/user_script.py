"""What the ranks execute of a user's script or module, and what they find in its arguments. Pure; on compute nodes."""

import re
from collections.abc import Mapping
from pathlib import Path

from hpc.spec import RunSpec

_PLACEHOLDER = re.compile(r"\{(data|run_dir|attempt)\}")


def script_argv(spec: RunSpec, code: Path, variables: Mapping[str, str]) -> list[str]:
    """The arguments of Python: the script, or `-m` and the module, and its own arguments.

    In these `{data}`, `{run_dir}` and `{attempt}` stand for the values in TORCHRELAY_DATA, TORCHRELAY_RUN_DIR and
    TORCHRELAY_ATTEMPT; all other braces stay.
    """
    own = 2 if spec.script[0] == "-m" else 1
    program = ["-m", spec.script[1]] if own == 2 else [str(code / spec.script[0])]

    def value(match: re.Match[str]) -> str:
        return variables.get(f"TORCHRELAY_{match[1].upper()}", match[0])

    return [*program, *(_PLACEHOLDER.sub(value, word) for word in spec.script[own:])]


def import_path(spec: RunSpec, code: Path) -> list[str]:
    """The directories of the user's code from which the script imports; those of a module as `hpc submit` found it."""
    return [str(code), *([str(code / "src")] if spec.script[0] == "-m" else [])]
