"""`hpc status`: a table of runs, for a single run also its interruptions; and the wait of `submit --wait`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.live import Live

from hpc import cli
from hpc.core.errors import UserError
from hpc.core.events.downtime import Interruption
from hpc.core.ownership import other_owner
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.status.cells import wait_reason
from hpc.status.details import interruption_table
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary
from hpc.status.table import view, watch_view

State = Literal["pending", "running", "completed", "failed", "cancelled"]
_WATCH_SECONDS, _WAIT_SECONDS = 2.0, 1.0
# The largest share of a core for --watch: users share login nodes.
_WATCH_SHARE = 0.1
_PIPE_WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class StatusOptions(cli.RunsOptions):
    """Show the state of runs."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run directories or names. Default: all runs in --runs-dir."""
    state: tyro.conf.UseAppendAction[tuple[State, ...]] = ()
    """Show only runs in this state. Repeatable."""
    mine: bool = False
    """Show only your own runs, if several users share --runs-dir."""
    watch: bool = False
    """Keep the table up to date until you press Ctrl-C."""


def status(options: StatusOptions) -> int:
    """Print the table, or the JSON document."""
    runs = _runs(options)
    if options.watch and not options.json:
        _watch(options)
    elif not runs and not options.json:
        whose = " of yours" if options.mine else ""
        print(f"no runs{whose} in {options.runs_dir}: start one with hpc submit --data fashion-mnist")
    else:
        rows = _chosen(options, summaries(runs))
        if options.json:
            cli.print_json([row.document() for row in rows])
        elif rows:
            print_table(rows, details=bool(options.run))
        else:
            print(f"no run is {' or '.join(options.state)}: leave out --state to see all ({len(runs)})")
    return 0


def _runs(options: StatusOptions) -> list[RunDir]:
    runs = cli.find_runs(options.run, options.runs_dir) if options.run else cli.all_runs(options.runs_dir)
    return [run for run in runs if not options.mine or other_owner(run.path) is None]


def _chosen(options: StatusOptions, rows: list[Summary]) -> list[Summary]:
    return [row for row in rows if not options.state or row.state in options.state]


def print_table(rows: list[Summary], *, details: bool) -> None:
    """Print the table; into a file or pipe, print all its columns."""
    console = _console()
    console.print(view(console, rows, details=details))


def print_interruptions(interruptions: Sequence[Interruption]) -> None:
    """Print the interruptions of a run, and their costs."""
    console = _console()
    console.print(interruption_table(console, interruptions))


def _console() -> Console:
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    return console


def summaries(runs: Sequence[RunDir]) -> list[Summary]:
    """Return one summary per run, with one squeue for all. Print a warning on stderr if Slurm does not answer."""
    cache = StatusCache()
    rows = cache.summaries(runs)
    if cache.problem:
        print(visible(cache.problem), file=sys.stderr)
    return rows


def _watch(options: StatusOptions) -> None:
    console, cache = Console(), StatusCache()
    if not console.is_terminal:
        raise UserError("--watch needs a terminal, and stdout is not one: leave it out, or use --json")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.process_time()
            rows = _chosen(options, cache.summaries(_runs(options)))
            drawn = watch_view(console, rows, details=bool(options.run), problem=cache.problem)
            live.update(drawn, refresh=True)
            time.sleep(max(_WATCH_SECONDS, (time.process_time() - began) / _WATCH_SHARE))


def wait_for_end(run: RunDir, answer: dict[str, Any] | None) -> int:
    """Wait for the end. Returns 0 if the run completed, 1 if it failed or was cancelled.

    With `answer`, the submission's JSON document, print nothing except that document with the final state in it.
    """
    if answer is None:
        print(f"run {run.name} in {run.path}\nCtrl-C ends the wait, not the run.", flush=True)
    printed, cache = "", StatusCache()
    while (row := cache.summary(run)).state not in TERMINAL:
        now = visible(progress(row))
        if answer is None and now != printed:
            print(f"{time.strftime('%H:%M:%S')} {now}", flush=True)
            printed = now
        time.sleep(_WAIT_SECONDS)
    if answer is not None:
        cli.print_json({**answer, "status": row.document()})
    else:
        print_table([row], details=True)
        if why := [text for text in (row.reason, row.detail) if text]:
            print(visible(": ".join([row.state, *why])), file=sys.stderr)
        result = f"\nresult   {run.final}" if run.final.exists() else ""
        print(f"logs     {run.logs}{result}")
        cli.print_next(run, "status", "logs")
    return 0 if row.state == "completed" else 1


def progress(row: Summary) -> str:
    """Return the progress of a run in one line."""
    if row.state == "pending":
        return ": ".join(filter(None, ["pending", wait_reason(row)]))
    if last := row.last_output:
        return f"attempt {row.attempt}: {last.line}"
    if row.step is None:
        return f"attempt {row.attempt or 1}: starting"
    # A user's script may log only some of these.
    loss = None if row.train_loss is None else f"{row.train_loss:.4f}"
    known = {"epoch": row.epoch, "step": row.step, "loss": loss}
    words = [f"{name} {value}" for name, value in known.items() if value is not None]
    return f"attempt {row.attempt}: {' '.join(words)}"


main = partial(cli.run, status, StatusOptions, "status")

if __name__ == "__main__":
    sys.exit(main())
