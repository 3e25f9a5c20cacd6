"""Makes the command line of a program's ranks, and reads what the program imports. Runs on compute nodes."""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hpc.run.spec_file import BRACE, Program

# Packages whose import neither starts threads nor queries GPUs. After either, forks would not work.
_SAFE_TO_FORK = frozenset({"PIL", "numpy", "timm", "torch", "torchvision"})
# Modules of the packages above whose import does query GPUs.
_NOT_SAFE = re.compile(r"torch\.(testing\._internal|utils\.(benchmark|cpp_extension|jit))\b")


def program_argv(program: Program, start: Path, places: Mapping[str, object]) -> list[str]:
    """Return the arguments of Python: the file, or `-m` and the module, and the program's own arguments.

    `start` is the directory in which the program starts. In the program's own arguments, the names of `places` in
    braces are replaced by their values; all other braces stay.
    """
    first, *others = program.argv
    # Normalize a path such as `../train.py`, because the script's directory becomes the first entry of sys.path.
    named = [first, others.pop(0)] if first == "-m" else [os.path.normpath(start / first)]
    values = {**places, BRACE[1:-1]: "{"}
    filled = (re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])), word) for word in others)
    return [*named, *filled]


@dataclass(frozen=True, kw_only=True)
class TopLevel:
    """The top level of a Python file: what it imports, and whether it uses os.environ before an import."""

    imports: tuple[str, ...] = ()
    """Modules that may be imported before the ranks fork."""
    prepares_imports: bool = False
    """Whether the file uses os.environ before an import: torch reads variables such as OMP_NUM_THREADS on import."""

    @classmethod
    def read(cls, program: Program, start: Path, import_path: Sequence[str]) -> Self:
        """Read a program's source. The result is empty if the source is not found, or cannot be parsed."""
        places, names = [start], [program.argv[0]]
        if program.argv[0] == "-m":
            module = program.argv[1].replace(".", "/")
            # Python searches its working directory first.
            places, names = [start, *map(Path, import_path)], [f"{module}.py", f"{module}/__main__.py"]
        paths = (place / name for place in places for name in names)
        path = next((path for path in paths if path.is_file()), None)
        try:
            return cls() if path is None else cls.parse(path.read_bytes())
        except (OSError, RecursionError, SyntaxError, ValueError):
            return cls()  # the rank fails with the same error, and says more

    @classmethod
    def parse(cls, source: bytes) -> Self:
        """Parse a program's source. Pure. Raises SyntaxError, or ValueError if there are null bytes."""
        statements = ast.parse(source).body
        imported = [list(_imported(statement)) for statement in statements]
        last = max((place for place, names in enumerate(imported) if names), default=0)
        names = dict.fromkeys(name for modules in imported for name in modules)
        return cls(
            imports=tuple(
                name for name in names if name.partition(".")[0] in _SAFE_TO_FORK and not _NOT_SAFE.match(name)
            ),
            prepares_imports=any(_uses_environment(statement) for statement in statements[:last]),
        )


def _imported(statement: ast.stmt) -> Iterator[str]:
    """Yield the modules that a statement imports, and the names that it imports from a module: they may be modules."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _uses_environment(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_definition and re.search(r"\b(environ|putenv)\b", ast.unparse(statement)) is not None
