"""Computes the paths that expressions in a Python file stand for, without running the file. Pure."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

_SAME = frozenset({"abspath", "realpath", "normpath", "fspath", "str"})
_SAME_OF_PATH = frozenset({"resolve", "absolute", "as_posix"})
_JOINS = frozenset({"join", "joinpath", "Path", "PurePath"})
_UPWARD = re.compile(r"\.\./\S*")
# Functions of which the argument ".." is a path.
_OF_DIRECTORIES = frozenset({"chdir", "listdir", "scandir", "walk"})


class PathExpressions:
    """The paths in a file's text that depend on the file's place or on the working directory.

    Absolute paths in the text are none of them: they mean the same wherever the file lies.

    Args:
        tree: the parsed file.
        file: its absolute path.
        here: the working directory in which it runs.
    """

    def __init__(self, tree: ast.AST, file: Path, here: Path) -> None:
        self._tree, self._file, self._here = tree, file, here
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and (text := self._text(node.value))
            ):
                self._names[node.targets[0].id] = text

    def search_path(self) -> list[Path]:
        """Return the directories that the file adds to `sys.path`."""
        found = list[ast.expr]()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith(("sys.path.", "site.")):
                found.append(node.args[-1])
            elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "sys.path":
                found.append(node.value)
        single = (part for node in found for part in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node]))
        return [self._absolute(text) for text in map(self._text, single) if text]

    def references(self) -> Iterator[Path]:
        """Yield the paths that are computed from `__file__` or the working directory, or that begin with `..`."""
        waiting = [self._tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str) and _UPWARD.fullmatch(node.value):
                    yield self._absolute(node.value)
            elif isinstance(node, ast.expr) and (text := self._text(node)):
                yield self._absolute(text)
            elif isinstance(node, ast.Call) and _name(node.func) in _OF_DIRECTORIES:
                yield from (self._absolute(text) for text in map(self._text, node.args[:1]) if text)
            elif not (isinstance(node, ast.Call) and _name(node.func) in _JOINS):
                # A part of a path whose other parts are unknown says nothing.
                waiting += ast.iter_child_nodes(node)

    def _absolute(self, text: str) -> Path:
        return Path(os.path.normpath(self._here / text))

    def _text(self, node: ast.AST | None) -> str | None:
        """Return the path that an expression stands for, absolute or relative to the working directory, or None."""
        match node:
            case ast.Name(id=name):
                return str(self._file) if name == "__file__" else self._names.get(name)
            case ast.Constant(value=str(text)) if not text.startswith("/"):
                return text
            case ast.Attribute() | ast.Subscript():
                return self._part(node)
            case ast.BinOp() | ast.JoinedStr():
                return self._combination(node)
            case ast.Call():
                return self._result(node)
        return None

    def _part(self, node: ast.Attribute | ast.Subscript) -> str | None:
        """Return the path of `os.pardir`, `PATH.parent` or `PATH.parents[NUMBER]`."""
        match node:
            case ast.Attribute(attr="pardir"):
                return os.pardir
            case ast.Attribute(attr="parent", value=inner):
                return self._parent(inner, 1)
            case ast.Subscript(value=ast.Attribute(attr="parents", value=inner), slice=ast.Constant(value=int(number))):
                return self._parent(inner, number + 1)
        return None

    def _combination(self, node: ast.BinOp | ast.JoinedStr) -> str | None:
        """Return the path of `PATH / NAME`, `PATH + TEXT` or an f-string."""
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._joined([left, right])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._concatenated([left, right])
            case ast.JoinedStr(values=parts):
                return self._concatenated(
                    [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                )
        return None

    def _result(self, call: ast.Call) -> str | None:
        name = _name(call.func)
        if name in {"getcwd", "cwd"}:
            return str(self._here)
        if name in _SAME_OF_PATH and isinstance(call.func, ast.Attribute) and not call.args:
            return self._text(call.func.value)
        if name == "dirname" and call.args:
            return self._parent(call.args[0], 1)
        if name in _SAME and call.args:
            return self._text(call.args[0])
        if name == "joinpath" and isinstance(call.func, ast.Attribute):
            return self._joined([call.func.value, *call.args])
        return self._joined(call.args) if name in _JOINS else None

    def _parent(self, node: ast.AST, levels: int) -> str | None:
        text = self._text(node)
        return None if text is None else os.path.normpath(self._here.joinpath(text, *[os.pardir] * levels))

    def _joined(self, nodes: list[ast.expr]) -> str | None:
        texts = [text for node in nodes if (text := self._text(node)) is not None]
        return str(Path(*texts)) if texts and len(texts) == len(nodes) else None

    def _concatenated(self, nodes: list[ast.expr]) -> str | None:
        first, *others = nodes
        texts = [self._text(first), *(_raw(node) or self._text(node) for node in others)]
        return "".join(filter(None, texts)) if None not in texts else None


def _raw(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
