"""A program from its command line to its exit code: parse flags, call, print errors in one line. Runs everywhere.

Exit codes: 0 done, 1 the work failed, 2 the user's mistake, 130 Ctrl-C.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import json
import operator
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.text import visible
from hpc.environment import CALLED

INTERRUPTED = 130
_WIDEST = 100  # columns of a description: longer lines are hard to read
SCHEMA = 1
"""Version of docs/json.schema.json: of a change that breaks readers."""
Options = TypeVar("Options")
_TYRO = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,  # help with STR instead of {None}|STR
    tyro.conf.PositionalMetavarFromFieldName,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Help:
    """What `--help` shows of flags, by the names of their fields."""

    hidden: Collection[str] = ()
    """Those that it leaves out."""
    inherited: Collection[str] = ()
    """Those whose default is what a run has: the help of the command says so once, and shows no default for them."""


ALL_FLAGS = Help()


def called(module: str) -> str:
    """What the user typed for this program: `hpc NAME`, or `python -m MODULE`."""
    return os.environ.get(CALLED, f"python -m {module}")


def flags(options: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    """The fields that are flags, those of groups of flags included."""
    for field in dataclasses.fields(options):
        group = _group(field)
        yield from flags(group) if group else [field]


def parse(
    options: type[Options], argv: Sequence[str], prog: str, *, prints: bool = True, shown: Help = ALL_FLAGS
) -> Options:
    """Parse flags into a dataclass. `--help` shows `shown` of them, and without `prints` it prints nothing.

    Raises:
        UserError: one line that names the wrong flag and the reason. (tyro draws a box of several lines.)
    """
    subcommands = get_args(options)
    if not subcommands:
        _check_flags(options, argv, prog)
    if not {"-h", "--help"}.isdisjoint(argv):
        views = (_for_help(each, shown) for each in subcommands or (options,))
        options = functools.reduce(operator.or_, views)
    box, text = io.StringIO(), _HelpText()
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(text):
            return tyro.cli(options, args=list(argv), prog=prog, config=_TYRO, console_outputs=prints)
    except SystemExit as stop:
        if stop.code in {0, None}:
            print(_wrapped(text.read_all()), end="")
            raise
        raise UserError(f"{_one_line(box.getvalue())} (see {prog} --help)") from None


# tyro's sentences about a command line, and ours.
_SENTENCES = {
    r"Unrecognized options: (.*)": r"unexpected argument: \1",
    r"Missing value for argument '(.*?)'.*": r"\1 has no value",
    r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?),?\)\.": r"\2 is '\1': use one of \3",
    r"Error parsing (\S+): could not convert string to float: ('.*')": r"\1 is \2: expected a number",
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: ('.*')": r"\1 is \2: expected a whole number",
    r"Error parsing (\S+): no type matching (\S+) could be instantiated from \[(.*?)\]\..*": r"\1 is \3: expected \2",
    r"Missing from [^:]*: (\S+) (.*) \(required\)": r"missing argument \1: \2",
}


def _one_line(box: str) -> str:
    """What tyro says in a box about a command line, in one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    sections = [section.strip() for section in re.split(r"─{3,}", " ".join(line for line in lines if line))]
    about_help = ("Argument helptext", "For full helptext")
    text = re.sub(r"\s+", " ", "; ".join(one for one in sections if one and not one.startswith(about_help)))
    return next((re.sub(theirs, ours, text) for theirs, ours in _SENTENCES.items() if re.fullmatch(theirs, text)), text)


class _HelpText(io.TextIOWrapper):
    """What tyro prints for stdout: with its colors if that is a terminal, and with the characters that it has."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n")
        self._is_terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        return self._is_terminal

    def read_all(self) -> str:
        """All that was printed."""
        self.seek(0)
        return self.read()


def _wrapped(text: str) -> str:
    """A help with its description, above the first box, as wide as the boxes at most: tyro does not wrap it."""
    description, box, flags_of_command = text.partition("╭")
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    usage, *lines = description.split("\n")
    for at, line in enumerate(lines):
        if line[:1].strip():  # not an example
            lines[at] = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([usage, *lines]) + box + flags_of_command


def _group(field: dataclasses.Field[Any]) -> type[Any] | None:
    """The dataclass of a field that is a group of flags."""
    kind = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def _check_flags(options: type[Any], argv: Sequence[str], prog: str) -> None:
    """Refuse the first flag that does not exist, and name the one that is most like it; tyro lists several."""
    known = {f"--{field.name.replace('_', '-')}" for field in flags(options)}
    for argument in argv:
        typed = argument.partition("=")[0]
        if re.match(r"--[A-Za-z]", typed) and typed.replace("_", "-") not in {*known, "--help"}:
            close = difflib.get_close_matches(typed, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{prog} --help lists the flags"
            raise UserError(f"there is no flag {typed}: {hint}")


def _for_help(options: type[Any], shown: Help) -> type[Any]:
    """The dataclass without hidden fields, and without the defaults that tell nothing: None, False and ''."""
    texts = flag_texts(options) if shown.inherited else {}

    def mark(name: str) -> Any:
        if name in shown.hidden:
            return tyro.conf.Suppress
        if name in shown.inherited:
            text = re.sub(r"\s*\bDefault: .*?\.(?=\s|$)", "", texts[name], flags=re.DOTALL)
            return tyro.conf.arg(help=text, help_behavior_hint="")
        return tyro.conf.arg(help_behavior_hint=_default_hint)

    return _annotated(options, mark)


def flag_texts(options: type[Any]) -> dict[str, str]:
    """The docstrings of the fields of a dataclass, by name, those of groups included."""
    found = dict[str, str]()
    for kind in reversed([kind for kind in options.__mro__ if dataclasses.is_dataclass(kind)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        lines = definition.body if isinstance(definition, ast.ClassDef) else []
        for line, after in itertools.pairwise(lines):
            match line, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    for group in filter(None, map(_group, dataclasses.fields(options))):
        found |= flag_texts(group)
    return found


def _annotated(options: type[Any], mark: Callable[[str], Any]) -> type[Any]:
    """The dataclass with what tyro should know of each flag, by its name, those of groups included."""
    types, values = dict[str, Any](), dict[str, Any]()
    for field in dataclasses.fields(options):
        kind: Any = field.type
        if group := _group(field):
            view = _annotated(group, mark)
            types[field.name] = Annotated[(view, *kind.__metadata__)]
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = dataclasses.field(default_factory=view)
        else:
            types[field.name] = Annotated[kind, mark(field.name)]
    members = {"__annotations__": types, "__doc__": options.__doc__, **values}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type(options.__name__, (options,), members))


def _default_hint(default: str) -> str:
    return "" if default in {"None", "False", "", "''", "()"} else f"(default: {default})"


def without_texts(options: type[Any]) -> type[Any]:
    """The dataclass without the help of its flags: tyro's scripts would offer the second line of a text as a word.

    Without defaults too: fish passes all flags of all verbs to Python in one argument, which Linux limits to 128 KiB.
    """
    nothing = tyro.conf.arg(help="", help_behavior_hint="")
    return _annotated(options, lambda _: nothing) if dataclasses.is_dataclass(options) else options


def print_completion(options: Any, prog: str, shell: str) -> None:
    """Print a script with which bash, zsh or fish completes the flags of a dataclass, or of a union of subcommands."""
    with contextlib.suppress(SystemExit):  # with 0
        tyro.cli(options, args=["--tyro-write-completion", shell, "-"], prog=prog, config=_TYRO)


def print_json(document: Any) -> None:
    """Print one JSON document, as docs/json.schema.json describes that of each verb."""
    print(json.dumps(versioned(document), indent=2))


def versioned(document: Any) -> Any:
    """A document, or each one of a list, with the version of the schema."""
    if isinstance(document, list):
        return [versioned(one) for one in document]
    return {"schema": SCHEMA, **document}


def json_report(arguments: Sequence[str]) -> Callable[[str, int], None]:
    """What prints an error with its exit code as a JSON document, if the arguments ask for one: for `run`."""

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
    """Call `work`, and return its exit code.

    An error is printed after `prefix`, with `debug` its traceback too, and reported with its exit code.
    """
    try:
        return work()
    except TorchrelayError as error:
        code, message = error.exit_code, " ".join(str(error).split())
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Without this, Python reports it again when it flushes at exit.
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
