"""`hpc clean`: list the disk use of old runs on shared storage, and remove them. Runs on the login node.

A run is removed whole or not at all: its directory is renamed, so that no verb takes it for a run, and then deleted.
The next `hpc clean --yes` finishes an interrupted deletion, and also removes what a killed submission left.
"""

import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded, is_temporary, remove_abandoned, storage_time
from hpc.base.flags import Flag
from hpc.base.text import visible
from hpc.base.units import Duration
from hpc.commands import cli
from hpc.run.events.history import State
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.slurm.alive import local_jobs, slurm_jobs, wait_for_ending_job
from hpc.slurm.squeue import SlurmJob
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL

_ANY_AGE = Duration(0)
_ENDING = "removed"
# No submission takes this long.
_ABANDONED_SECONDS = 86400.0
_REMOVED = re.compile(rf"\..+\.[0-9a-f]{{32}}\.{_ENDING}")


@dataclass(frozen=True, kw_only=True)
class CleanOptions(cli.RunsOptions):
    """List the runs that have ended by the disk space that they use, or remove them with --yes.

    Pending and running runs and the runs of other users stay.
    """

    run: Annotated[tuple[str, ...], cli.ANY_RUNS] = ()
    """Run directories or names. Default: all runs in --runs-dir."""
    older_than: Annotated[Duration, Flag(metavar="TIME")] = _ANY_AGE
    """Only runs whose files have not changed for this long: 12h, 30d."""
    state: Annotated[str, Flag(metavar="STATES")] = ",".join(sorted(TERMINAL))
    """Only runs in these states, separated by commas."""
    checkpoints_only: bool = False
    """Remove only the checkpoints, not best/, final/, metrics, logs and report.
    The run can then no longer be resumed or forked."""
    yes: bool = False
    """Remove the runs. Without this flag, hpc clean only lists them."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A run that has ended, and the space that it uses."""

    run: str
    run_dir: str
    state: State
    last_used: float
    """The time when a file of the run was last written, in seconds since the epoch."""
    size: int
    """Bytes that the run's removal frees, without files that it shares with its forks."""
    checkpoints: int
    """Bytes of the run's checkpoints, a part of `size`."""


def clean(options: CleanOptions) -> int:
    """List the runs, or remove them. Returns 1 if something could not be removed."""
    freed = attrgetter("checkpoints" if options.checkpoints_only else "size")
    found = sorted(_chosen(options), key=freed, reverse=True)
    is_narrowed = options.run or options.older_than != _ANY_AGE or options.state != CleanOptions.state
    if options.yes and found and not (is_narrowed or options.checkpoints_only):
        raise UserError(
            f"--yes alone would remove all {len(found)} runs that have ended: name them, or give --older-than 30d, "
            "--state failed,cancelled or --checkpoints-only"
        )
    problems = _remove(options, found) if options.yes else {}
    chosen, found = found, [one for one in found if one.run_dir not in problems]
    total = sum(map(freed, found))
    if options.json:
        runs = [asdict(one) for one in found]
        cli.print_json({"removed": options.yes, "bytes": total, "runs": runs, "problems": list(problems.values())})
    elif not chosen:
        print(f"nothing to remove: no run in {options.runs_dir} that these flags name has ended")
    elif found:
        Console().print(_table(found))
        what = "the checkpoints of these runs" if options.checkpoints_only else "these runs"
        print(f"removed {what}: {decimal(total)}" if options.yes else f"{decimal(total)}: --yes removes {what}")
    for problem in problems.values():
        print(f"hpc clean: {visible(problem)}", file=sys.stderr)
    return int(bool(problems))


# --- listing ---


def _chosen(options: CleanOptions) -> list[Holding]:
    """Return the runs that match the flags. Raises UserError for wrong flags and for named runs that must stay."""
    wanted = set(options.state.split(","))
    if wanted - TERMINAL:
        raise UserError(f"--state is {options.state!r}: use one or several of {','.join(sorted(TERMINAL))}")
    oldest = storage_time(expanded(options.runs_dir)) - options.older_than.seconds
    runs = [cli.find_own_run(name, options.runs_dir) for name in options.run] or cli.all_runs(options.runs_dir)
    states, jobs = _states(runs)
    found = list[Holding]()
    for run in runs:
        state = states.get(str(run.path), "running")
        problem = why_it_stays(run, state, jobs)
        if problem and options.run and state in TERMINAL and _alive(run, jobs):
            wait_for_ending_job(run)
            problem = _why_it_stays_now(run, state)
        if problem and options.run:
            raise UserError(problem)
        if not problem and state in wanted and (holding := _holding(run, state)).last_used <= oldest:
            found.append(holding)
    return found


def _states(runs: Sequence[RunDir]) -> tuple[dict[str, State], Mapping[str, SlurmJob] | None]:
    """Return the state of each run by its directory, and the user's Slurm jobs. Raises TorchrelayError."""
    cache = StatusCache()
    states = {row.run_dir: row.state for row in cache.summaries(runs)}
    jobs = cache.queue(runs)
    if cache.problem:
        raise TorchrelayError(f"{cache.problem}; which runs have ended is unknown: try again later")
    return states, jobs


def why_it_stays(run: RunDir, state: str, jobs: Mapping[str, SlurmJob] | None) -> str:
    """Return why a run must stay; empty if it may go. `jobs` are the user's Slurm jobs, None if Slurm was not asked."""
    try:
        check_is_own(run)
    except UserError as error:
        return str(error)
    if run.script.exists() and jobs is None:
        return f"run {run.name} was submitted to Slurm and may have a job: type this on a machine with Slurm"
    alive = _alive(run, jobs)
    if state in TERMINAL and not alive:
        return ""
    what = f"has job {alive[0]}" if alive else f"is {state}"
    return f"run {run.name} {what}: type hpc cancel {run.name}, and repeat hpc clean when it has ended"


def _alive(run: RunDir, jobs: Mapping[str, SlurmJob] | None) -> list[str]:
    return local_jobs(run) + (slurm_jobs(run, jobs) if jobs else [])


def _holding(run: RunDir, state: State) -> Holding:
    times, size, checkpoints = [0.0], 0, 0
    files = (Path(directory, name) for directory, _, names in os.walk(run.path) for name in names)
    for path in (run.path, *files):
        with suppress(FileNotFoundError):  # another process has just removed it
            status = path.lstat()
            times.append(status.st_mtime)
            # A file with another hard link, such as in a fork, stays.
            freed = status.st_blocks * 512 if status.st_nlink == 1 and path != run.path else 0
            size += freed
            checkpoints += freed if path.is_relative_to(run.checkpoints) else 0
    return Holding(
        run=run.name, run_dir=str(run.path), state=state, last_used=max(times), size=size, checkpoints=checkpoints
    )


def _table(found: Sequence[Holding]) -> Table:
    sizes = [Column(name, justify="right") for name in ("size", "checkpoints")]
    table = Table(Column("run", overflow="fold"), "state", "last used", *sizes, box=None, pad_edge=False)
    for one in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.last_used))
        table.add_row(Text(visible(one.run)), one.state, used, decimal(one.size), decimal(one.checkpoints))
    return table


# --- removal ---


def _remove(options: CleanOptions, found: Sequence[Holding]) -> dict[str, str]:
    """Remove runs or their checkpoints, and leftovers of killed processes.

    Returns a sentence for each run that stays, by its directory.
    """
    problems, runs = dict[str, str](), {one: RunDir(Path(one.run_dir)) for one in found}
    places = {expanded(options.runs_dir).resolve(), *(run.path.parent for run in runs.values())}
    for place in {*places, *(run.path for run in runs.values())}:
        remove_abandoned(place, ".*", _is_abandoned)
    for one, run in runs.items():
        try:
            # Minutes may have passed since the runs were listed.
            if problem := _why_it_stays_now(run, one.state):
                problems[one.run_dir] = problem
            else:
                remove(run.checkpoints if options.checkpoints_only else run.path)
        except (OSError, TorchrelayError) as error:
            problems[one.run_dir] = f"run {run.name} is not removed, or not in full: {error}"
    return problems


def _why_it_stays_now(run: RunDir, listed: State) -> str:
    """Return why a run that was listed in a state must stay, after all; empty if it may go or is gone."""
    states, jobs = _states([run])
    if not (state := states.get(str(run.path))):
        return ""
    if state in TERMINAL and state != listed:
        return f"run {run.name} was {listed} and is {state} now: repeat hpc clean"
    return why_it_stays(run, state, jobs)


def _is_abandoned(path: Path) -> bool:
    """Return whether an interrupted removal or a killed submission has left this directory."""
    if _REMOVED.fullmatch(path.name):
        return True
    return is_temporary(path) and storage_time(path.parent) - path.stat().st_mtime > _ABANDONED_SECONDS


def remove(directory: Path) -> None:
    """Remove a directory, if it exists. It is renamed first, so that no process sees a part of it under its name.

    Raises:
        OSError: the directory could not be renamed, and is unchanged; or a part of it is left under the new name.
    """
    doomed = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.{_ENDING}")
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


main = partial(cli.run, clean, CleanOptions, "clean")
