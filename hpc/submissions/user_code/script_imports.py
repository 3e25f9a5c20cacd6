"""Reads the text of the user's script and of the modules that it imports, without running any. Login node."""

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

# Texts of files that may name a path outside of their directory, and the nodes of an expression that may do so.
_NAMES_PLACES = re.compile(rb"__file__|\.\.|\bcwd|pardir|sys\.path|\bsite\.")
_OF_PATHS = (
    ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.BinOp, ast.Div, ast.Add, ast.JoinedStr, ast.FormattedValue,
    ast.Subscript, ast.UnaryOp, ast.USub, ast.Load,
)  # fmt: skip


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

    It runs in the directory `here`. Python looks for its modules in `search` and among the installed packages.
    """
    trees, files, references, installed = dict[Path, ast.Module](), {script}, set[Path](), set[str]()
    waiting, places = [script], list(search)
    while waiting:
        file = waiting.pop(0)
        try:
            data = file.read_bytes()
            tree = ast.parse(data)
            paths = _Paths(tree, file, here) if _NAMES_PLACES.search(data) else None
        except (OSError, RecursionError, SyntaxError, ValueError):
            continue  # this Python cannot parse the file; the run will report that, with the line
        trees[file] = tree
        if paths:
            places += paths.added
            references |= {*paths.added, *paths.references}
        for names, bases in _imports(tree, file, places):
            own = next((files_of for base in bases if (files_of := _module_files(base, names))), [])
            waiting += [path for path in own if path not in files]
            files.update(own)
            installed.update(names[:1] if not own else ())
    return ScriptText(
        trees=trees, files=frozenset(files), references=frozenset(references), installed=frozenset(installed)
    )


def module_directories(here: Path, top: Path) -> list[Path]:
    """Return the possible places of a repository's modules: the working directory, the top, and `src` at the top."""
    return list(dict.fromkeys((here, top, top / "src")))


def module_file(name: str, search: Sequence[Path]) -> Path | None:
    """Return the file that `python -m NAME` would run from the first directory in `search` that has it, or None."""
    below = name.replace(".", "/")
    files = (base / text for base in search for text in (f"{below}/__main__.py", f"{below}.py"))
    return next(filter(os.path.isfile, files), None)


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


class _Paths:
    """The paths that a file computes from its own place or from the working directory.

    Expressions of paths are evaluated with functions that touch no file. Absolute paths in the text do not count: they
    mean the same wherever the file lies.

    Attributes:
        added: the directories that the file adds to `sys.path`.
        references: all other paths, also those that begin with `..`.
    """

    def __init__(self, tree: ast.AST, file: Path, here: Path) -> None:
        class PlainPath(PurePosixPath):
            def resolve(self) -> "PlainPath":
                return PlainPath(os.path.normpath(here / self))

            absolute = resolve
            cwd = staticmethod(lambda: PlainPath(here))

        path = {
            "join": os.path.join, "dirname": os.path.dirname, "normpath": os.path.normpath,
            **dict.fromkeys(("abspath", "realpath"), lambda text: os.path.normpath(here / text)),
        }  # fmt: skip
        system = {
            "pardir": os.pardir, "sep": os.sep, "getcwd": lambda: str(here),
            **dict.fromkeys(("fspath", "chdir", "listdir", "scandir", "walk"), str),
        }  # fmt: skip
        self._here = here
        self._names: dict[str, object] = {
            **path, **system, "str": str, "__file__": str(file), "__builtins__": {}, "Path": PlainPath,
            "pathlib": SimpleNamespace(Path=PlainPath), "os": SimpleNamespace(path=SimpleNamespace(**path), **system),
        }  # fmt: skip
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if (text := self._value(value)) is not None:
                    self._names[name] = text
        self.added = [path_of for node in _added(tree) if (path_of := self._path(node))]
        self.references = list(self._references(tree))

    def _references(self, tree: ast.AST) -> Iterator[Path]:
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str) and re.fullmatch(r"\.\./\S*", node.value):
                    yield Path(os.path.normpath(self._here / node.value))
            elif isinstance(node, ast.expr) and (found := self._path(node)):
                yield found
            else:
                waiting += ast.iter_child_nodes(node)

    def _path(self, node: ast.expr) -> Path | None:
        value = self._value(node)
        return None if value is None else Path(os.path.normpath(self._here / str(value)))

    def _value(self, node: ast.expr) -> str | PurePosixPath | None:
        """Return the path that an expression stands for, or None."""
        parts = list(ast.walk(node))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        attributes = (part.attr for part in parts if isinstance(part, ast.Attribute))
        is_of_paths = all(isinstance(part, _OF_PATHS) for part in parts) and names <= self._names.keys()
        if not is_of_paths or any(name.startswith("_") for name in attributes):
            return None
        try:
            value = eval(compile(ast.Expression(node), "", "eval"), dict(self._names))  # noqa: S307 - it can do nothing
        except Exception:  # noqa: BLE001 - an expression of the user's that is no path
            return None
        texts = (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        is_absolute = any(text.startswith("/") and str(value).startswith(text) for text in texts)
        return value if isinstance(value, str | PurePosixPath) and not is_absolute else None


def _added(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of the directories that a file adds to `sys.path`."""
    for node in ast.walk(tree):
        value = None
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith(("sys.path.", "site.")):
            value = node.args[-1]
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "sys.path":
            value = node.value
        if value is not None:
            yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
