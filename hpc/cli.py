"""What all verbs share: parse the flags, call, and turn errors into one line and an exit code.

Runs on the login node. Exit codes: 0 done, 1 the work failed, 2 the user's mistake.
"""

import contextlib
import difflib
import io
import json
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from hpc import slurm
from hpc.errors import TorchrelayError, UserError
from hpc.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Common:
    """The flags of every verb."""

    json: bool = False
    """Print one JSON document, and nothing else, on stdout."""
    debug: bool = False
    """Show the traceback of an error."""


Options = TypeVar("Options")


def parse(options: type[Options], argv: Sequence[str], prog: str) -> Options:
    """Parse flags into a dataclass.

    Raises:
        UserError: one line that says which flag is wrong and why. (tyro draws a box of several.)
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(options, args=list(argv), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if stop.code in {0, None}:
            raise
        raise UserError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """The sentence inside the box that tyro draws around an error."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    sections = [section.strip() for section in re.split(r"─{3,}", " ".join(line for line in lines if line))]
    useful = [section for section in sections if section and not section.startswith("Argument helptext")]
    return re.sub(r"\s+", " ", "; ".join(useful))


def run(
    verb: Callable[[Any], int],
    options: type[Any],
    argv: Sequence[str] | None,
    name: str,
    expand: Callable[[list[str]], list[str]] = list,
) -> int:
    """Run one verb from its command line to its exit code. `expand` may add arguments before they are parsed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        slurm.adopt_environment(os.environ)
        return verb(parse(options, expand(arguments), f"hpc {name}"))
    except TorchrelayError as error:
        if debug:
            traceback.print_exc()
        print(f"hpc {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            traceback.print_exc()
        print(f"hpc {name}: {error}", file=sys.stderr)
        return UserError.exit_code if isinstance(error, PermissionError) else TorchrelayError.exit_code
    except KeyboardInterrupt:
        return 130


def own_command() -> str:
    """What to type for `hpc` here: that, if the PATH leads to this environment's, else its place."""
    own = Path(sys.executable).with_name("hpc")
    on_path = shutil.which("hpc")
    if on_path is not None and Path(on_path) == own:
        return "hpc"
    near = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return shlex.quote(str(near))


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))


def find_run(run: str, runs_dir: Path) -> RunDir:
    """The run that the user named, by its directory or by its name below the runs directory.

    Raises:
        UserError: there is none; lists close names.
    """
    for path in (Path(run).expanduser(), runs_dir.expanduser() / run):
        if (path / "spec.json").is_file():
            return RunDir(path.resolve())
    names = [known.name for known in all_runs(runs_dir)]
    close = difflib.get_close_matches(run, names, n=3, cutoff=0.5) or sorted(names)[-3:]
    known = f"there is {', '.join(close)}" if close else f"{runs_dir} holds no run; see --runs-dir"
    raise UserError(f"no run {run!r}: {known}")


def all_runs(runs_dir: Path) -> list[RunDir]:
    """Every run below a runs directory, the oldest first."""
    directory = runs_dir.expanduser().resolve()
    if not directory.is_dir():
        return []
    # A colleague's runs in a shared directory are closed to us, as ours are to them.
    entries = [entry for entry in directory.iterdir() if os.access(entry, os.R_OK | os.X_OK)]
    found = [(spec.stat().st_mtime, spec.parent) for entry in entries if (spec := entry / "spec.json").is_file()]
    return [RunDir(path) for _, path in sorted(found)]
