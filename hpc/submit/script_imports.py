"""Finds the user's own files that a script or module imports, without running any. Runs on the login node."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path


def imported_files(script: Path, search: Sequence[Path]) -> set[Path]:
    """Return the files of the modules that a script imports, even indirectly, if they are in `search`.

    Imports within functions and conditions count; imports of a computed name are not seen.
    """
    found, waiting = set[Path](), [script]
    while waiting:
        new = set(_directly_imported(waiting.pop(), search)) - found
        found |= new
        waiting += new
    return found - {script}


def module_directories(root: Path, working_directory: str) -> list[Path]:
    """Return the possible places of a repository's modules: the working directory, the top, and `src` at the top."""
    return list(dict.fromkeys((root / working_directory, root, root / "src")))


def module_file(name: str, search: Sequence[Path]) -> Path | None:
    """Return the file that `python -m NAME` would run from the first directory in `search` that has it, or None."""
    *packages, last = name.split(".")
    for base in search:
        parent = base.joinpath(*packages)
        found = next(filter(Path.is_file, (parent / last / "__main__.py", parent / f"{last}.py")), None)
        if found:
            return found
    return None


def _directly_imported(file: Path, search: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # this Python cannot parse the file; the run will report that, with the line
    for node in ast.walk(tree):
        bases = search
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module.split(".") if node.module else []
            # A name that is imported from a package may be one of its modules.
            modules = [[*package, alias.name] for alias in node.names]
            bases = [file.parents[node.level - 1]] if node.level else search
        else:
            continue
        for names in modules:
            yield from next((files for base in bases if (files := _module_files(base, names))), [])


def _module_files(base: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a module and of its packages that exist below a directory."""
    paths = [base.joinpath(*names[: number + 1]) for number in range(len(names))]
    choices = [(path / "__init__.py", path.with_name(f"{path.name}.py")) for path in paths]
    return [next(filter(Path.is_file, pair)) for pair in choices if any(map(Path.is_file, pair))]
