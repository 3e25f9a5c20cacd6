"""Reads the text of the user's script and of the modules that it imports, without running any. Login node."""

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.submissions.user_code.path_expressions import PathExpressions


@dataclass(frozen=True, kw_only=True)
class ScriptText:
    """The user's own files that run as a rank."""

    trees: dict[Path, ast.Module]
    """The parsed files: first the script, then each module that it imports, even indirectly."""
    files: frozenset[Path]
    """The same files, and those that this Python cannot parse."""
    references: frozenset[Path]
    """The paths that these files compute from `__file__` or the working directory, or that begin with `..`."""
    installed: frozenset[str]
    """The top-level modules that these files import and that are not the user's own."""


NO_TEXT = ScriptText(trees={}, files=frozenset(), references=frozenset(), installed=frozenset())
"""The text if no file of the user runs."""


def read_script(script: Path, here: Path, search: Sequence[Path]) -> ScriptText:
    """Read a script and the modules that it imports, if they are in `search` or where the files extend `sys.path`.

    Imports within functions and conditions count; imports of a computed name are not seen.

    Args:
        script: the script, or a module's file.
        here: the working directory in which it runs.
        search: the directories in which Python looks for its modules, except those of installed packages.
    """
    trees, files, references, installed = dict[Path, ast.Module](), {script}, set[Path](), set[str]()
    waiting, places = [script], list(search)
    while waiting:
        file = waiting.pop(0)
        try:
            tree = ast.parse(file.read_bytes())
            paths = PathExpressions(tree, file, here)
            added, referred = paths.search_path(), set(paths.references())
        except (OSError, RecursionError, SyntaxError, ValueError):
            continue  # this Python cannot parse the file; the run will report that, with the line
        trees[file] = tree
        places += added
        references.update(added, referred)
        for names, bases in _imports(tree, file, places):
            own = next((found for base in bases if (found := _module_files(base, names))), [])
            new = [path for path in own if path not in files]
            files.update(new)
            waiting += new
            installed.update(names[:1] if not own else ())
    return ScriptText(
        trees=trees, files=frozenset(files), references=frozenset(references), installed=frozenset(installed)
    )


def module_directories(here: Path, top: Path) -> list[Path]:
    """Return the possible places of a repository's modules: the working directory, the top, and `src` at the top."""
    return list(dict.fromkeys((here, top, top / "src")))


def module_file(name: str, search: Sequence[Path]) -> Path | None:
    """Return the file that `python -m NAME` would run from the first directory in `search` that has it, or None."""
    *packages, last = name.split(".")
    for base in search:
        parent = base.joinpath(*packages)
        found = next(filter(os.path.isfile, (parent / last / "__main__.py", parent / f"{last}.py")), None)
        if found:
            return found
    return None


def _imports(tree: ast.Module, file: Path, search: Sequence[Path]) -> Iterator[tuple[list[str], Sequence[Path]]]:
    """Yield each module that a parsed file imports, as the parts of its name, and the directories that may have it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split("."), search) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module.split(".") if node.module else []
            bases = [file.parents[node.level - 1]] if node.level else search
            # A name that is imported from a package may be one of its modules.
            yield from (([*package, alias.name], bases) for alias in node.names)


def _module_files(base: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a module and of its packages that exist below a directory."""
    paths = [base.joinpath(*names[: number + 1]) for number in range(len(names))]
    choices = [(path / "__init__.py", path.with_name(f"{path.name}.py")) for path in paths]
    # Unlike Path.is_file, this raises no error in a directory that the user cannot read.
    return [next(filter(os.path.isfile, pair)) for pair in choices if any(map(os.path.isfile, pair))]
