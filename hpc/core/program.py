"""A program from its command line to its exit code: parse flags, call, print errors in one line. Runs everywhere.

Exit codes: 0 done, 1 the work failed, 2 the user's mistake, 130 Ctrl-C.
"""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.text import visible

INTERRUPTED = 130
Options = TypeVar("Options")
_TYRO = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,  # help with STR instead of {None}|STR
    tyro.conf.PositionalMetavarFromFieldName,
)


def parse(options: type[Options], argv: Sequence[str], prog: str, *, prints: bool = True) -> Options:
    """Parse flags into a dataclass. Without `prints`, `--help` prints nothing.

    Raises:
        UserError: one line that names the wrong flag and the reason. (tyro draws a box of several lines.)
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(options, args=list(argv), prog=prog, config=_TYRO, console_outputs=prints)
    except SystemExit as stop:
        if stop.code in {0, None}:
            raise
        lines = [line.strip("│╭╮╰╯ ") for line in box.getvalue().splitlines()[1:]]
        sections = [section.strip() for section in re.split(r"─{3,}", " ".join(line for line in lines if line))]
        useful = [section for section in sections if section and not section.startswith("Argument helptext")]
        raise UserError(re.sub(r"\s+", " ", "; ".join(useful))) from None


def run(work: Callable[[], int], prefix: str = "error", *, debug: bool = False) -> int:
    """Call `work`, and return its exit code. An error is printed after `prefix`, with `debug` its traceback too."""
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
    return code
