"""Runs a program: reads its flags, prints its help or error, calls its function, and returns its exit code.

The flags of a program are the fields of a dataclass. Their docstrings are the help, and a field that is a dataclass is
a group of flags. `read` returns the text of each flag on a command line. `build` makes the dataclass from these texts,
or from values that come from a file or a program.
Exit codes: 0 success, 1 failure, 2 the user's mistake, 130 Ctrl-C. Runs everywhere.
"""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from hpc.base.environment import CALLED
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.flags import Flag
from hpc.base.text import did_you_mean, visible
from hpc.base.units import Word

INTERRUPTED = 130
SCHEMA = 1
"""Version of docs/json.schema.json; a change that breaks readers raises it."""
_WIDEST = 100  # columns of the help: longer lines are hard to read
_INDENT = 24  # columns before the texts of flags
Field = dataclasses.Field[Any]
Options = TypeVar("Options")
Explanation = Callable[[Sequence[str], int], str | None]
"""A function that returns what to type instead of the word at an index of a command line; None without advice."""


def called(module: str) -> str:
    """Return the command with which the user called this program: `hpc NAME`, or `python -m MODULE`."""
    return os.environ.get(CALLED, f"python -m {module}")


def parse(options: type[Options], argv: Sequence[str], prog: str) -> Options:
    """Make a dataclass from a command line, or show the help and exit. Raises UserError if a flag is wrong."""
    return build(options, read((options,), argv, prog))


# --- dataclasses of flags ---


def flags(options: type[Any]) -> Iterator[Field]:
    """Yield the fields of a dataclass that are flags, including those of its groups."""
    for field in dataclasses.fields(options):
        if group := group_of(field):
            yield from flags(group)
        elif not mark_of(field).is_internal:
            yield field


def offered(options: type[Any]) -> list[Field]:
    """Return the flags that help and documentation show: all but those that the command refuses."""
    return [field for field in flags(options) if field.name not in getattr(options, "REFUSED", ())]


def flag_name(field: Field) -> str:
    """Return the name of a field's flag without dashes: `batch-size`."""
    return field.name.replace("_", "-")


def mark_of(field: Field) -> Flag:
    """Return the mark of a field, such as its letter or metavar; an empty one if it has none."""
    return next((mark for mark in getattr(field.type, "__metadata__", ()) if isinstance(mark, Flag)), Flag())


def group_of(field: Field) -> type[Any] | None:
    """Return the dataclass of a field that is a group of flags; None if the field is a single flag."""
    kind, _, _ = _unwrapped(field.type)
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def choices_of(field: Field) -> tuple[str, ...]:
    """Return the possible values of a field, if its type lists them."""
    kind, _, _ = _unwrapped(field.type)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _unwrapped(kind: Any) -> tuple[Any, bool, bool]:
    """Return the type of a field's value, whether the field may be None, and whether it is a tuple of values."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if may_be_none := NoneType in get_args(kind):
        kind = get_args(kind)[0]
    is_tuple = get_origin(kind) is tuple
    return get_args(kind)[0] if is_tuple else kind, may_be_none, is_tuple


def is_required(field: Field) -> bool:
    """Return whether a flag has no default."""
    return field.default is field.default_factory is dataclasses.MISSING


def default_text(field: Field) -> str:
    """Return the default of a flag as the help shows it: nothing, if it is that the flag is not set."""
    text = "" if field.default is dataclasses.MISSING else str(field.default)
    return "" if text in {"None", "False", "()"} else text


def values_of(*settings: Any) -> dict[str, Any]:
    """Return the values of dataclasses and of their groups, by flag name."""
    values = dict[str, Any]()
    for options in settings:
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if group_of(field):
                values |= values_of(value)
            elif not mark_of(field).is_internal:
                values[flag_name(field)] = value
    return values


def default_values(options: type[Any]) -> dict[str, Any]:
    """Return the defaults of a dataclass and of its groups, by flag name."""
    return {flag_name(field): field.default for field in flags(options)}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the types of JSON and YAML."""
    return {
        name: str(value) if isinstance(value, Path | Word) else list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


def changed(settings: Mapping[str, Any], options: type[Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults of `options`, in the types of JSON and YAML."""
    defaults = plain(default_values(options))
    return {name: value for name, value in plain(settings).items() if value != defaults[name]}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with these settings. Their values have the types that `changed` returns."""
    words = list[str]()
    for name, value in settings.items():
        several = value if isinstance(value, list) else [value]
        switch = {True: f"--{name}", False: f"--no-{name}"}
        words += [switch[value]] if isinstance(value, bool) else [f"--{name}={item}" for item in several]
    return words


def flag_texts(options: type[Any]) -> dict[str, str]:
    """Return the help of the flags of a dataclass and of its groups, by field name."""
    texts = field_texts(options) | {field.name: mark.help for field in flags(options) if (mark := mark_of(field)).help}
    for group in filter(None, map(group_of, dataclasses.fields(options))):
        texts |= flag_texts(group)
    return texts


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a class and of its bases, by field name."""
    texts = dict[str, str]()
    for owner in reversed(list(filter(inspect.get_annotations, kind.__mro__))):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        lines = definition.body if isinstance(definition, ast.ClassDef) else []
        for line, after in itertools.pairwise(lines):
            match line, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts


# --- the parser ---


def read(
    options: Sequence[type[Any]],
    argv: Sequence[str],
    prog: str,
    explain: Explanation = lambda _argv, _at: None,
    *,
    hidden: Collection[str] = (),
    inherited: Collection[str] = (),
) -> dict[str, Any]:
    """Return the texts of the flags and positional arguments on a command line, by name without leading dashes.

    If the command line asks for help, prints the help and exits. The help leaves out the flags of the `hidden` fields,
    and the defaults of the `inherited` ones: those are the values of a run, which the command's text says once.
    `options` are the dataclass of the program's flags, then those of flags that the caller refuses with a reason.

    Raises:
        UserError: a flag does not exist or has no value, a switch has a value, or a word belongs to no flag.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        _help_parser(options[0], prog, hidden, inherited).print_help()
        sys.exit(0)
    # Of flags with one name, that of the first dataclass counts.
    known = {flag.name: flag for kind in reversed(options) for flag in flags(kind)}
    parser = argparse.ArgumentParser(prog, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS)
    for flag in known.values():
        add_flag(parser, flag)
    try:
        typed, others = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:  # Only a switch can be wrong: the parser accepts a missing value.
        switch, _, _ = str(error.argument_name).partition("/")
        raise UserError(f"{switch} takes no value (see {prog} --help)") from error
    for word in others:
        raise UserError(explain(argv, argv.index(word)) or _not_known(word, known.values(), prog))
    for name, value in vars(typed).items():
        if None in (value if isinstance(value, list) else [value]):
            raise UserError(f"--{name} has no value (see {prog} --help)")
    return vars(typed)


def _help_parser(
    options: type[Any], prog: str, hidden: Collection[str], inherited: Collection[str]
) -> argparse.ArgumentParser:
    """Return a parser that prints the help. The texts are docstrings, which are read from the source."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    shown = {flag.name: flag for flag in offered(options) if flag.name not in hidden}
    positional = [_metavar(flag) for flag in shown.values() if mark_of(flag).is_positional]
    texts = flag_texts(options)
    parser = argparse.ArgumentParser(
        prog, usage=" ".join([prog, "[-h] [OPTIONS]", *positional]), description=_wrapped(options.__doc__, width),
        formatter_class=partial(argparse.RawTextHelpFormatter, width=width, max_help_position=_INDENT),
    )  # fmt: skip
    for field in dataclasses.fields(options):
        group = group_of(field)
        own = [flag for flag in (flags(group) if group else [field]) if shown.pop(flag.name, None)]
        place: Any = parser
        if group:
            title = getattr(group, "TITLE", field.name.replace("_", " "))
            place = parser.add_argument_group(title, _wrapped(group.__doc__, width - 2) if own else None)
        for flag in own:
            text = _help_of(flag, texts.get(flag.name, ""), is_inherited=flag.name in inherited)
            add_flag(place, flag, _wrapped(text, width - _INDENT))
    return parser


def add_flag(parser: Any, field: Field, help_text: str | None = None) -> None:
    """Add a flag to a parser or a group: with all its spellings or, if it has a help text, as people should see it."""
    name, mark, for_help = flag_name(field), mark_of(field), help_text is not None
    _, _, is_tuple = _unwrapped(field.type)
    words = [*filter(None, [mark.letter]), f"--{name}", *([] if for_help else [f"--{field.name}"])]
    # A missing value becomes None. argparse's error would hide the error of an unknown flag, which explains more.
    nargs = "*" if is_tuple and not mark.is_repeatable else "?"
    settings: dict[str, Any] = {"dest": name, "metavar": _metavar(field), "nargs": None if for_help else nargs}
    if mark.is_positional:
        words = [name]
        settings = {"metavar": _metavar(field), "nargs": nargs, "default": [] if nargs == "*" else argparse.SUPPRESS}
    elif field.type is bool:
        settings = {"dest": name, "action": "store_true" if for_help else argparse.BooleanOptionalAction}
    elif mark.is_repeatable:
        settings["action"] = "append"
    if for_help and choices_of(field):
        settings["choices"] = choices_of(field)
    parser.add_argument(*words, help=help_text, **settings)


def _metavar(field: Field) -> str:
    kind, _, _ = _unwrapped(field.type)
    choices = f"{{{','.join(choices_of(field))}}}" if choices_of(field) and not mark_of(field).is_positional else ""
    names = {int: "N", float: "N", Path: "PATH"}
    return mark_of(field).metavar or choices or names.get(kind, field.name.upper())


def _help_of(field: Field, text: str, *, is_inherited: bool) -> str:
    """Return the help of a flag with its default, or without any default if a run has the value."""
    text = text.replace("%", "%%")  # argparse replaces %(default)s
    if is_inherited:
        return re.sub(r"\s*\bDefault: .*?\.(?=\s|$)", "", text, flags=re.DOTALL)
    if is_required(field):
        return text if mark_of(field).is_positional else f"{text} (required)"
    default = default_text(field)
    return f"{text} (default: {default})" if default else text


def _wrapped(text: str | None, width: int) -> str:
    """Wrap each paragraph and each item of a list. Examples, which are indented, stay as they are."""
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    paragraphs = re.sub(r"(?<=\S)\n(?!\s|- )", " ", inspect.cleandoc(text or "")).split("\n")
    return "\n".join(
        line if line.startswith(" ") else fill(line, subsequent_indent="  " * line.startswith("- "))
        for line in paragraphs
    )


# --- values ---


def build(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Make a dataclass and its groups from values by flag name, which are texts of a command line or Python values.

    Raises:
        UserError: a value does not fit its flag, a flag does not exist, or an argument is missing.
    """
    fields = {flag_name(field): field for field in flags(options)}
    for name in values.keys() - fields.keys():
        raise UserError(_not_known(f"--{name}", fields.values(), "hpc submit"))
    for name, field in fields.items():
        if is_required(field) and name not in values:
            choices = f"use one of {', '.join(choices_of(field))}" if choices_of(field) else ""
            raise UserError(f"missing argument {field.name.upper()}: {choices or flag_texts(options)[field.name]}")
    return _built(options, values)


def _built(options: type[Options], values: Mapping[str, Any]) -> Options:
    arguments = dict[str, Any]()
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if group := group_of(field):
            arguments[field.name] = _built(group, values)
        elif (name := flag_name(field)) in values:
            label = field.name if mark_of(field).is_positional else f"--{name}"
            arguments[field.name] = _converted(label, field.type, values[name])
    return options(**arguments)


def _converted(label: str, kind: Any, value: Any) -> Any:
    """Convert a value to the type of a field: parse text, or turn a number into text if the field holds text.

    Raises:
        UserError: the value does not fit. The message names `label`, the value, and what is expected.
    """
    kind, may_be_none, is_tuple = _unwrapped(kind)
    if value is None and may_be_none:
        return None
    if is_tuple:
        is_single = isinstance(value, str) or not isinstance(value, Iterable)
        return tuple(_converted(label, kind, item) for item in ([value] if is_single else value))
    if get_origin(kind) is Literal:
        if value not in (choices := get_args(kind)):
            raise UserError(f"{label} is {value!r}: use one of {', '.join(map(repr, choices))}")
        return value
    if issubclass(kind, Word):
        try:
            return value if isinstance(value, kind) else kind.parse(str(value))
        except ValueError as error:
            raise UserError(f"{label} {error}") from error
    convert, accepted, expected = _KINDS[kind]
    is_accepted = kind is bool if isinstance(value, bool) else isinstance(value, accepted)
    with contextlib.suppress(ValueError, KeyError):
        if is_accepted:
            return convert(value)
    raise UserError(f"{label} is {str(value)!r}: expected {expected}")


# For each type of field: the conversion, the types that it accepts besides bool, and their description in errors.
_KINDS: dict[type, tuple[Callable[[Any], Any], tuple[type, ...], str]] = {
    bool: (lambda value: {"true": True, "false": False}[str(value).lower()], (str,), "true or false"),
    int: (int, (int, str), "a whole number"),
    float: (float, (float, int, str), "a number"),
    str: (str, (str, int, float, os.PathLike), "text"),
    Path: (Path, (str, os.PathLike), "a path"),
}


def _not_known(word: str, known: Iterable[Field], prog: str) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument: {word} (see {prog} --help)"
    names = [f"--{flag_name(field)}" for field in known if not mark_of(field).is_positional]
    return (
        f"there is no flag {flag}: {did_you_mean(flag.replace('_', '-'), names, f'{prog} --help lists the flags', 1)}"
    )


# --- the end of a program ---


def print_json(document: Any) -> None:
    """Print a document as JSON with its schema version; docs/json.schema.json describes the document of each verb."""
    print(json.dumps(versioned(document), indent=2))


def versioned(document: Any) -> Any:
    """Return a document, or each document of a list, with the version of the schema."""
    if isinstance(document, list):
        return [versioned(item) for item in document]
    return {"schema": SCHEMA, **document}


def run(work: Callable[[], int], prefix: str = "error", words: Sequence[str] = ()) -> int:
    """Call `work`, and return its exit code, or the exit code for its error or for Ctrl-C.

    Prints an error after `prefix`; with --debug among the words of the command line, also its traceback, and with
    --json a document.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have bytes that are not UTF-8
    try:
        return work()
    except TorchrelayError as error:
        code, message = error.exit_code, " ".join(str(error).split())
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would report this again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        kind = UserError if isinstance(error, PermissionError) else TorchrelayError
        code, message = kind.exit_code, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    if "--debug" in words:
        traceback.print_exc()
    print_error(message, code, prefix, words)
    return code


def print_error(message: str, code: int, prefix: str, words: Sequence[str]) -> None:
    """Print an error; with --json among the words of the command line, also as a document."""
    print(f"{prefix}: {visible(message)}", file=sys.stderr)
    if "--json" in words:
        print_json({"error": message, "exit_code": code})
