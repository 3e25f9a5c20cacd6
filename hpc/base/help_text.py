"""Makes the help of a program from its dataclass of flags, with tyro, which also makes the shell completion."""

import dataclasses
import functools
import io
import operator
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from types import NoneType
from typing import Annotated, Any, get_args

import tyro

from hpc.base import program
from hpc.base.program import Help
from hpc.base.units import Word

_WIDEST = 100  # columns of a description: longer lines are hard to read
TYRO = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,  # the help shows N, not {None}|N
    tyro.conf.PositionalMetavarFromFieldName,
)


def show(options: type[Any], prog: str, shown: Help, *, prints: bool) -> None:
    """Print the help and exit. `options` may be a union of subcommands."""
    text = _HelpText()
    try:
        with redirect_stdout(text):
            tyro.cli(_for_help(options, shown), args=["--help"], prog=prog, config=TYRO, console_outputs=prints)
    finally:
        text.seek(0)
        print(_wrapped(text.read()), end="")


class _HelpText(io.TextIOWrapper):
    """Collects the output of tyro, in the colors and characters that stdout can show."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n")
        self._is_terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        return self._is_terminal


def _wrapped(text: str) -> str:
    """Wrap the description above the first box of a help text, because tyro does not."""
    description, box, flags_of_command = text.partition("╭")
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    usage, *lines = description.split("\n")
    for at, line in enumerate(lines):
        if line[:1].strip():  # not an indented example
            lines[at] = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([usage, *lines]) + box + flags_of_command


def _for_help(options: type[Any], shown: Help) -> type[Any]:
    """Return a dataclass for the help, without hidden flags and without defaults that say nothing (None, False, '')."""
    texts = program.flag_texts(options) if shown.inherited else {}

    def mark(name: str) -> Any:
        if name in shown.hidden:
            return tyro.conf.Suppress
        if name in shown.inherited:
            text = re.sub(r"\s*\bDefault: .*?\.(?=\s|$)", "", texts[name], flags=re.DOTALL)
            return tyro.conf.arg(help=text, help_behavior_hint="")
        return tyro.conf.arg(help_behavior_hint=_default_hint)

    return annotated(options, mark)


def annotated(options: type[Any], mark: Callable[[str], Any]) -> type[Any]:
    """Return a subclass that annotates each flag, also in groups, with the tyro marker `mark(field name)`.

    `options` may be a union of subcommands.
    """
    if kinds := get_args(options):
        return functools.reduce(operator.or_, (annotated(each, mark) for each in kinds))
    types, values = dict[str, Any](), dict[str, Any]()
    for field in dataclasses.fields(options):
        if group := program.group_of(field):
            view = annotated(group, mark)
            types[field.name] = Annotated[(view, tyro.conf.OmitArgPrefixes)]
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = dataclasses.field(default_factory=view)
        else:
            types[field.name] = Annotated[(_tyro_type(field), *_tyro_marks(field), mark(field.name))]
            if isinstance(field.default, Word):
                values[field.name] = str(field.default)
    # The checks of the class expect values, but the help has the texts of some.
    unchecked = {"__post_init__": lambda _: None}
    members = {"__annotations__": types, "__doc__": options.__doc__, **unchecked, **values}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type(options.__name__, (options,), members))


def _tyro_type(field: dataclasses.Field[Any]) -> Any:
    kind = program.type_of(field)
    is_word = any(isinstance(part, type) and issubclass(part, Word) for part in (kind, *get_args(kind)))
    return (str | None if NoneType in get_args(kind) else str) if is_word else kind


def _tyro_marks(field: dataclasses.Field[Any]) -> list[Any]:
    mark = program.mark_of(field)
    marks = [tyro.conf.Positional] if mark.is_positional else []
    marks += [tyro.conf.UseAppendAction] if mark.is_repeatable else []
    letters = (mark.letter,) if mark.letter else None
    kinds = {program.type_of(field), *get_args(program.type_of(field))}
    metavar = mark.metavar or ("N" if {int, float} & kinds else None)
    return [*marks, tyro.conf.arg(metavar=metavar, help=mark.help or None, aliases=letters)]


def _default_hint(default: str) -> str:
    return "" if default in {"None", "False", "", "''", "()"} else f"(default: {default})"
