"""What all verbs share: common flags, exit codes, JSON output, finding runs. Runs on the login node."""

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from hpc.core import program
from hpc.core.errors import UserError
from hpc.core.ownership import check_is_own
from hpc.core.rundir import RunDir
from hpc.slurm import client as slurm
from training.config import command_line, defaults

Options = TypeVar("Options")
GROUPS, CANCELLED_GROUP = ("sweep", "scaling"), "cancelled"
"""Directories of runs that belong together (hpc.group) have a file KIND.json; `hpc cancel` puts the other there."""
print_json, versioned = program.print_json, program.versioned


@dataclass(frozen=True, kw_only=True)
class Common:
    """The flags of every verb."""

    json: bool = False
    """Print one JSON document, and nothing else."""
    debug: bool = False
    """Print the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class RunsOptions(Common):
    """The flags of a verb about runs."""

    runs_dir: Path = Path("runs")
    """Directory of the runs."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunsOptions):
    """The flags of a verb about one run."""

    run: tyro.conf.Positional[str]
    """Run directory or name."""


def run(
    verb: Callable[[Any], int],
    options: type[Any],
    name: str,
    argv: Sequence[str] | None = None,
    expand: Callable[[list[str]], list[str]] | None = None,
    shown: program.Help = program.ALL_FLAGS,
) -> int:
    """Run a verb from its command line to its exit code.

    `expand` adds defaults before the arguments are parsed. `shown` is what the help shows.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        return verb(parse(options, name, arguments, expand, shown))

    return program.run(work, f"hpc {name}", debug="--debug" in arguments, report=program.json_report(arguments))


def parse(
    options: type[Options],
    name: str,
    arguments: list[str],
    expand: Callable[[list[str]], list[str]] | None = None,
    shown: program.Help = program.ALL_FLAGS,
) -> Options:
    """The flags of a verb, with defaults as in `run`. Raises UserError if one is wrong."""
    given = arguments
    if isinstance(options, type) and issubclass(options, RunsOptions):
        given = [f"--runs-dir={runs_dir(arguments)}", *arguments]
    given = expand(given) if expand else given  # it may read variables of sbatch
    slurm.adopt_environment(os.environ)
    return program.parse(options, given, f"hpc {name}", shown=shown)


def runs_dir(arguments: list[str]) -> Path:
    """The directory of the runs, before the arguments are parsed: of the last --runs-dir, or the user's default."""
    typed = command_line.last_value(arguments, "--runs-dir")
    return Path(typed or defaults.merge(defaults.read()).get("runs-dir", "runs"))


def own_command() -> str:
    """How to call this environment's `hpc` here: by name if the PATH finds it, else by its path."""
    own = Path(sys.executable).with_name("hpc")
    if Path(shutil.which("hpc") or "") == own:
        return "hpc"
    near = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return shlex.quote(str(near))


def print_next(run: RunDir, *verbs: str) -> None:
    """Print what to type next about a run: with its name if verbs find it by name, or with its path."""
    name = run.name if run.path.parent == Path("runs").resolve() else str(run.path)
    print("next:", *(f"  {own_command()} {verb} {shlex.quote(name)}" for verb in verbs), sep="\n")


def find_run(run: str, runs_dir: Path) -> RunDir:
    """The run with this directory, or this name in the runs directory or a group; a UserError if there is none."""
    for path in (Path(run).expanduser(), runs_dir.expanduser() / run):
        if (path / "spec.json").is_file():
            return RunDir(path.resolve())
    known = {one.name: one for one in all_runs(runs_dir)}
    if run in known:
        return known[run]
    names = list(known)
    close = difflib.get_close_matches(run, names, n=3, cutoff=0.5) or sorted(names)[-3:]
    hint = f"existing runs: {', '.join(close)}" if close else f"{runs_dir} contains no runs (see --runs-dir)"
    raise UserError(f"there is no run {run!r}: {hint}")


def find_runs(names: Sequence[str], runs_dir: Path) -> list[RunDir]:
    """The runs with these directories or names, and those of groups. Raises UserError as `find_run`."""
    found = list[RunDir]()
    for name in names:
        group = find_group(name, runs_dir)
        found += all_runs(group) if group else [find_run(name, runs_dir)]
    return found


def find_group(name: str, runs_dir: Path) -> Path | None:
    """The directory of a sweep or of a scaling study; None if there is none of this name."""
    paths = (Path(name).expanduser(), runs_dir.expanduser() / name)
    return next((path.resolve() for path in paths if _is_group(path)), None)


def _is_group(path: Path) -> bool:
    return any((path / f"{kind}.json").is_file() for kind in GROUPS)


def find_own_run(run: str, runs_dir: Path) -> RunDir:
    """`find_run` for a verb that acts on the run; a UserError too if others made it or can change it."""
    found = find_run(run, runs_dir)
    check_is_own(found)
    return found


def all_runs(runs_dir: Path) -> list[RunDir]:
    """Every run in a runs directory and its groups, oldest first."""
    return [RunDir(path) for _, path in sorted(_dated_runs(runs_dir))]


def _dated_runs(runs_dir: Path) -> Iterator[tuple[float, Path]]:
    """When each run was submitted, and where it is."""
    directory = runs_dir.expanduser().resolve()
    if not directory.is_dir():
        return
    # In a shared directory, the runs of other users are not readable.
    # A hidden directory is a run that is being removed (hpc.clean).
    visible = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    for entry in visible:
        if not os.access(entry, os.R_OK | os.X_OK):
            continue
        if (spec := entry / "spec.json").is_file():
            yield spec.stat().st_mtime, entry
        elif _is_group(entry):
            yield from _dated_runs(entry)
