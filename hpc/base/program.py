"""Runs a program from its command line to its exit code: reads flags, calls the work, prints an error in one line.

`read` returns the text of each flag on a command line. `build` makes a dataclass from these texts, or from values that
come from a file or a program. argparse parses the command line; `help_text` makes the help.
Exit codes: 0 done, 1 the work failed, 2 the user's mistake, 130 Ctrl-C. Runs everywhere.
"""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
Options = TypeVar("Options")
Explanation = Callable[[Sequence[str], int], str | None]
"""A function that returns what to type instead of the word at an index of a command line; None without advice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Help:
    """Names of the fields whose flags `--help` treats specially."""

    hidden: Collection[str] = ()
    """Flags that the help leaves out."""
    inherited: Collection[str] = ()
    """Flags whose defaults are the values of a run. The command's text says so once, instead of each flag's help."""


ALL_FLAGS = Help()


def called(module: str) -> str:
    """Return the command with which the user called this program: `hpc NAME`, or `python -m MODULE`."""
    return os.environ.get(CALLED, f"python -m {module}")


def flags(options: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of a dataclass that are flags, including those of its groups."""
    for field in dataclasses.fields(options):
        group = group_of(field)
        yield from flags(group) if group else [field]


def parse(options: type[Options], argv: Sequence[str], prog: str, *, prints: bool = True) -> Options:
    """Make a dataclass from a command line. If `prints` is False, as on all ranks except 0, --help prints nothing.

    Raises:
        UserError: a flag is wrong. The message names the flag and the reason.
    """
    print_help(options, argv, prog, prints=prints)
    return build(options, read((options,), argv, prog))


# --- from words to values ---


def flag_name(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's flag without dashes: `batch-size`."""
    return field.name.replace("_", "-")


def read(
    options: Sequence[type[Any]], argv: Sequence[str], prog: str, explain: Explanation = lambda _argv, _at: None
) -> dict[str, Any]:
    """Return the texts of the flags and positional arguments on a command line, by name without leading dashes.

    The first of `options` has the program's flags. The flags of the others are read too, so that the caller can say why
    it refuses them. `explain` may return what to type instead of a word of `argv` that cannot be read.

    Raises:
        UserError: a flag does not exist or has no value, a switch has a value, or a word belongs to no flag.
    """
    known = {flag_name(field): field for kind in reversed(options) for field in flags(kind)}
    try:
        typed, others = _parser(known).parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:  # Only a switch can be wrong: the parser accepts a missing value.
        switch, _, _ = str(error.argument_name).partition("/")
        raise UserError(f"{switch} takes no value (see {prog} --help)") from error
    for word in others:
        raise UserError(explain(argv, argv.index(word)) or _not_known(word, known, prog))
    for name, value in vars(typed).items():
        if None in (value if isinstance(value, list) else [value]):
            raise UserError(f"--{name} has no value (see {prog} --help)")
    return vars(typed)


def _parser(known: Mapping[str, dataclasses.Field[Any]]) -> argparse.ArgumentParser:
    """Return a parser that collects the texts of the flags and positional arguments that were typed."""
    parser = argparse.ArgumentParser(
        usage="", add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for name, field in known.items():
        mark = mark_of(field)
        words = [f"--{name}", f"--{field.name}", *filter(None, [mark.letter])]
        # A missing value becomes None. argparse's error would hide the error of an unknown flag, which explains more.
        nargs = "*" if _is_tuple(field) and not mark.is_repeatable else "?"
        if mark.is_positional:
            parser.add_argument(name, nargs=nargs, default=[] if nargs == "*" else argparse.SUPPRESS)
        elif field.type is bool:
            parser.add_argument(*words, dest=name, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*words, dest=name, nargs=nargs, action="append" if mark.is_repeatable else "store")
    return parser


def build(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Make a dataclass and its groups from values by flag name, which are texts of a command line or Python values.

    Raises:
        UserError: a value does not fit its flag, a flag does not exist, or an argument is missing.
    """
    fields = {flag_name(field): field for field in flags(options)}
    for name in values.keys() - fields.keys():
        raise UserError(_not_known(f"--{name}", fields, "hpc submit"))
    for name, field in fields.items():
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and name not in values:
            raise UserError(f"missing argument {field.name.upper()}: {flag_texts(options)[field.name]}")
    return _built(options, values)


def _built(options: type[Options], values: Mapping[str, Any]) -> Options:
    found = dict[str, Any]()
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if group := group_of(field):
            found[field.name] = _built(group, values)
        elif (name := flag_name(field)) in values:
            label = field.name if mark_of(field).is_positional else f"--{name}"
            found[field.name] = taken(label, field.type, values[name])
    return options(**found)


def values_of(*settings: Any) -> dict[str, Any]:
    """Return the values of dataclasses and of their groups, by flag name."""
    found = dict[str, Any]()
    for one in settings:
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            found |= values_of(value) if group_of(field) else {flag_name(field): value}
    return found


def default_values(options: type[Any]) -> dict[str, Any]:
    """Return the defaults of a dataclass and of its groups, by flag name."""
    return {flag_name(field): field.default for field in flags(options)}


def taken(label: str, kind: Any, value: Any) -> Any:
    """Convert a value to the type `kind` of a field: parse text, or turn a number into text if the field holds text.

    Raises:
        UserError: the value does not fit. The message names `label`, the value, and what is expected.
    """
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if NoneType in get_args(kind):
        if value is None:
            return None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        several = isinstance(value, Iterable) and not isinstance(value, str)
        return tuple(taken(label, get_args(kind)[0], item) for item in (value if several else (value,)))
    if get_origin(kind) is Literal:
        if value not in (choices := get_args(kind)):
            raise UserError(f"{label} is {value!r}: use one of {', '.join(map(repr, choices))}")
        return value
    if issubclass(kind, Word):
        try:
            return value if isinstance(value, kind) else kind.parse(str(value))
        except ValueError as error:
            raise UserError(f"{label} {error}") from error
    from_text, accepted, expected = _KINDS[kind]
    with contextlib.suppress(ValueError, KeyError):
        if isinstance(value, accepted) and isinstance(value, bool) <= (kind is bool):
            return from_text(value)
    raise UserError(f"{label} is {str(value)!r}: expected {expected}")


# For each type of field: the conversion, the types that it accepts, and their description in errors.
_KINDS: dict[type, tuple[Callable[[Any], Any], tuple[type, ...], str]] = {
    bool: (lambda value: {"true": True, "false": False}[str(value).lower()], (bool, str), "true or false"),
    int: (int, (int, str), "a whole number"),
    float: (float, (float, int, str), "a number"),
    str: (str, (str, int, float, os.PathLike), "text"),
    Path: (Path, (str, os.PathLike), "a path"),
}


def _not_known(word: str, known: Mapping[str, dataclasses.Field[Any]], prog: str) -> str:
    """Return the error message for an unknown flag, with the most similar one, or for a word that is not expected."""
    flag, otherwise = word.partition("=")[0], f"{prog} --help lists the flags"
    if not flag.startswith("-"):
        return f"unexpected argument: {word} (see {prog} --help)"
    names = [f"--{name}" for name, field in known.items() if not mark_of(field).is_positional]
    return f"there is no flag {flag}: {did_you_mean(flag.replace('_', '-'), names, otherwise, 1)}"


def mark_of(field: dataclasses.Field[Any]) -> Flag:
    """Return what the command line knows of a field."""
    return next((mark for mark in getattr(field.type, "__metadata__", ()) if isinstance(mark, Flag)), Flag())


def type_of(field: dataclasses.Field[Any]) -> Any:
    """Return the type of a field's values."""
    return get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type


def _is_tuple(field: dataclasses.Field[Any]) -> bool:
    kind = type_of(field)
    return get_origin(kind) is tuple or any(get_origin(each) is tuple for each in get_args(kind))


def group_of(field: dataclasses.Field[Any]) -> type[Any] | None:
    """Return the dataclass of a field that is a group of flags; None if the field is a single flag."""
    kind = type_of(field)
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


# --- help ---


def print_help(
    options: type[Any], argv: Sequence[str], prog: str, shown: Help = ALL_FLAGS, *, prints: bool = True
) -> None:
    """Print the help and exit if the command line asks for it. `options` may be a union of subcommands."""
    if not {"-h", "--help"}.isdisjoint(argv):
        from hpc.base import help_text  # noqa: PLC0415  # it imports tyro, which takes 0.1 s

        help_text.show(options, prog, shown, prints=prints)


def flag_texts(options: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and of its groups, by field name."""
    found = field_texts(options)
    for group in filter(None, map(group_of, dataclasses.fields(options))):
        found |= flag_texts(group)
    return found


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a class and of its bases, by field name."""
    found = dict[str, str]()
    for owner in reversed(list(filter(inspect.get_annotations, kind.__mro__))):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        lines = definition.body if isinstance(definition, ast.ClassDef) else []
        for line, after in itertools.pairwise(lines):
            match line, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def print_json(document: Any) -> None:
    """Print a document as JSON with its schema version; docs/json.schema.json describes the document of each verb."""
    print(json.dumps(versioned(document), indent=2))


def versioned(document: Any) -> Any:
    """Return a document, or each document of a list, with the version of the schema."""
    if isinstance(document, list):
        return [versioned(one) for one in document]
    return {"schema": SCHEMA, **document}


def json_report(arguments: Sequence[str]) -> Callable[[str, int], None]:
    """Return a `report` for `run` that prints an error as a JSON document if --json is among the arguments."""

    def report(message: str, exit_code: int) -> None:
        if "--json" in arguments:
            print_json({"error": message, "exit_code": exit_code})

    return report


def run(
    work: Callable[[], int],
    prefix: str = "error",
    *,
    debug: bool = False,
    report: Callable[[str, int], None] = lambda _message, _exit_code: None,
) -> int:
    """Call `work`, and return its exit code, or the exit code for its error or for Ctrl-C.

    Prints an error after `prefix`, and its traceback if `debug`. Then calls `report` with the message and exit code.
    """
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
    if debug:
        traceback.print_exc()
    print(f"{prefix}: {visible(message)}", file=sys.stderr)
    report(message, code)
    return code
