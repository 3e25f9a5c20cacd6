"""What all verbs share: common flags, exit codes, JSON output, finding runs. Runs on the login node."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hpc.base import program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded
from hpc.base.flag_files import merge_defaults, read_defaults
from hpc.base.flags import POSITIONAL, Flag
from hpc.base.text import similar, visible
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.slurm import client as slurm

GROUPS, CANCELLED_GROUP = ("sweep", "scaling"), "cancelled"
"""The directory of a group of runs has sweep.json or scaling.json, and CANCELLED_GROUP if the group is cancelled."""
_LONGEST_PAUSE_SECONDS = 300.0
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


# How the help writes the names of one or more runs, and of any number.
RUNS = Flag(metavar="RUN [RUN ...]", is_positional=True)
ANY_RUNS = Flag(metavar="[RUN ...]", is_positional=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunsOptions):
    """The flags of a verb about one run."""

    run: Annotated[str, POSITIONAL]
    """Run directory or name."""


def run(
    verb: Callable[[Any], int],
    options: type[Any],
    name: str,
    argv: Sequence[str] | None = None,
    *,
    complete: Callable[[dict[str, Any]], Any] | None = None,
    refused: tuple[type[Any], ...] = (),
    **reading: Any,
) -> int:
    """Run a verb: read its command line, call `verb` with the options, and return the exit code.

    `complete` makes the options from the typed flags, and adds further defaults. If a flag of the `refused` dataclasses
    is given, it raises an error that says why. `reading` has further arguments of `program.read`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        values = program.read((options, *refused), arguments, f"hpc {name}", **reading)
        if issubclass(options, RunsOptions):
            values["runs-dir"] = runs_dir(values)
        marks = {field.name: program.mark_of(field) for field in program.flags(options)}
        if marks.get("run", ANY_RUNS) != ANY_RUNS and not values.get("run"):
            raise UserError(f"no run is named: type hpc {name} NAME; hpc status lists the runs")
        made = complete(values) if complete else program.build(options, values)
        slurm.adopt_environment(os.environ)  # after parsing: variables of sbatch set defaults of flags
        return verb(made)

    return program.run(work, f"hpc {name}", arguments)


def repeat(name: str, seconds: float, check: Callable[[], object], fatal: type[Exception]) -> None:
    """Call `check` until it returns True, with a pause in between, which grows while it raises errors but `fatal`."""
    pause, is_over = seconds, False
    while not is_over:
        try:
            is_over, pause = check() is True, seconds
        except fatal:
            raise
        except (TorchrelayError, OSError) as error:
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            print(visible(f"{name}: next check in {pause:.0f} s: {error}"), file=sys.stderr, flush=True)
        if not is_over:
            time.sleep(pause)


def runs_dir(given: Mapping[str, Any]) -> Path:
    """Return the runs directory that was typed, or else the user's default."""
    return Path(given.get("runs-dir") or merge_defaults(read_defaults()).get("runs-dir", "runs"))


def own_command() -> str:
    """Return how to call this environment's `hpc` here: by name if PATH finds it, else by its path."""
    own = Path(sys.executable).with_name("hpc")
    if Path(shutil.which("hpc") or "") == own:
        return "hpc"
    near = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return shlex.quote(str(near))


def print_next(run: RunDir, *verbs: str) -> None:
    """Print the commands to type next for a run: with its name if it is in ./runs, else with its path."""
    name = run.name if run.path.parent == Path("runs").resolve() else str(run.path)
    print("next:", *(f"  {own_command()} {verb} {shlex.quote(name)}" for verb in verbs), sep="\n")


def find_run(run: str, runs_dir: Path) -> RunDir:
    """Return the run with this path, or this name in `runs_dir` or in a group. Raises UserError if there is none."""
    for path in (expanded(run), expanded(runs_dir) / run):
        if (path / "spec.json").is_file():
            return RunDir(path.resolve())
    known = {one.name: one for one in all_runs(runs_dir)}
    if run in known:
        return known[run]
    names = list(known)
    close = similar(run, names) or sorted(names)[-3:]
    hint = f"existing runs: {', '.join(close)}" if close else f"{runs_dir} contains no runs (see --runs-dir)"
    raise UserError(f"there is no run {run!r}: {hint}")


def find_runs(names: Sequence[str], runs_dir: Path) -> list[RunDir]:
    """Return the runs with these paths or names; a group's name means all its runs. Raises UserError as `find_run`."""
    found = list[RunDir]()
    for name in names:
        group = find_group(name, runs_dir)
        found += all_runs(group) if group else [find_run(name, runs_dir)]
    return found


def find_group(name: str, runs_dir: Path) -> Path | None:
    """Return the directory of the sweep or scaling study of this name; None if there is none."""
    paths = (expanded(name), expanded(runs_dir) / name)
    return next((path.resolve() for path in paths if _is_group(path)), None)


def _is_group(path: Path) -> bool:
    return any((path / f"{kind}.json").is_file() for kind in GROUPS)


def find_own_run(run: str, runs_dir: Path) -> RunDir:
    """Return a run to act on, as `find_run` does. Raises UserError also if another user owns it or can change it."""
    found = find_run(run, runs_dir)
    check_is_own(found)
    return found


def all_runs(runs_dir: Path) -> list[RunDir]:
    """Return every run in a runs directory and its groups, oldest first."""
    return [RunDir(path) for _, path in sorted(_dated_runs(runs_dir))]


def _dated_runs(runs_dir: Path) -> Iterator[tuple[float, Path]]:
    """Yield the time at which each run was submitted, and its directory."""
    directory = expanded(runs_dir).resolve()
    if not directory.is_dir():
        return
    # Other users' runs in a shared directory may be unreadable. A hidden directory may be a run that is being made or
    # removed (hpc.commands.runs.clean).
    for entry in directory.iterdir():
        if entry.name.startswith(".") or not os.access(entry, os.R_OK | os.X_OK):
            continue
        if (spec := entry / "spec.json").is_file():
            yield spec.stat().st_mtime, entry
        elif _is_group(entry):
            yield from _dated_runs(entry)
