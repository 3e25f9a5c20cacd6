"""What the ranks execute of a user's script or module, and what they find in its arguments. Runs on compute nodes."""

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hpc.environment import ATTEMPT, DATA, RUN_DIR
from hpc.spec import RunSpec

# Packages that neither start threads nor query GPUs when they are imported; a fork would survive neither.
_SAFE_TO_FORK = frozenset({"PIL", "numpy", "timm", "torch", "torchvision"})
# Their modules that do query GPUs.
_NOT_SAFE = re.compile(r"torch\.(testing\._internal|utils\.(benchmark|cpp_extension|jit))\b")
_PLACEHOLDERS = {"{data}": DATA, "{run_dir}": RUN_DIR, "{attempt}": ATTEMPT}
_PLACEHOLDER = re.compile("|".join(map(re.escape, _PLACEHOLDERS)))


def script_argv(spec: RunSpec, code: Path, variables: Mapping[str, str]) -> list[str]:
    """The arguments of Python: the script, or `-m` and the module, and its own arguments.

    In these `{data}`, `{run_dir}` and `{attempt}` stand for the values in TORCHRELAY_DATA, TORCHRELAY_RUN_DIR and
    TORCHRELAY_ATTEMPT; all other braces stay.
    """
    own = 2 if spec.script[0] == "-m" else 1
    # The path is normalized, as in `../train.py`, because the script's directory becomes the first of sys.path.
    program = ["-m", spec.script[1]] if own == 2 else [os.path.normpath(code / spec.working_directory / spec.script[0])]

    def value(match: re.Match[str]) -> str:
        return variables.get(_PLACEHOLDERS[match[0]], match[0])

    return [*program, *(_PLACEHOLDER.sub(value, word) for word in spec.script[own:])]


def import_path(spec: RunSpec, code: Path) -> list[str]:
    """The directories of the user's code from which the script imports; those of a module as `hpc submit` found it."""
    return [str(code), *([str(code / "src")] if spec.script[0] == "-m" else [])]


@dataclass(frozen=True, kw_only=True)
class TopLevel:
    """What a Python file does at its top level."""

    imports: tuple[str, ...] = ()
    """Modules that may be imported before the ranks fork."""
    prepares_imports: bool = False
    """It uses os.environ before an import: variables such as OMP_NUM_THREADS are read when torch is imported."""

    @classmethod
    def read(cls, spec: RunSpec, code: Path) -> Self:
        """That of the run's script; of a module elsewhere than in the user's code, nothing is known."""
        start = code / spec.working_directory
        places, names = [start], [spec.script[0]]
        if spec.script[0] == "-m":
            module = spec.script[1].replace(".", "/")
            # Python searches its working directory first.
            places, names = [start, *map(Path, import_path(spec, code))], [f"{module}.py", f"{module}/__main__.py"]
        paths = (place / name for place in places for name in names)
        path = next((path for path in paths if path.is_file()), None)
        try:
            return cls() if path is None else cls.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return cls()  # the rank fails with it, and says more

    @classmethod
    def parse(cls, source: bytes) -> Self:
        """Pure. Raises SyntaxError, and ValueError if there are null bytes."""
        statements = ast.parse(source).body
        imported = [list(_imported(statement)) for statement in statements]
        last = max((place for place, names in enumerate(imported) if names), default=0)
        names = dict.fromkeys(name for each in imported for name in each)
        return cls(
            imports=tuple(
                name for name in names if name.partition(".")[0] in _SAFE_TO_FORK and not _NOT_SAFE.match(name)
            ),
            prepares_imports=any(_uses_environment(statement) for statement in statements[:last]),
        )


def _imported(statement: ast.stmt) -> Iterator[str]:
    """The modules that a statement imports, and what it imports from them, which may be modules, too."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _uses_environment(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_definition and re.search(r"\b(environ|putenv)\b", ast.unparse(statement)) is not None
