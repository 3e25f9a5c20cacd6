"""`hpc status`: print a table of runs, or a single run in detail. Runs on the login node."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from rich.console import Console
from rich.live import Live

from hpc.base.errors import UserError
from hpc.commands import cli
from hpc.run.ownership import other_owner
from hpc.run.rundir import RunDir
from hpc.status.details import watch_view
from hpc.status.printing import print_table, summaries
from hpc.status.run_view import StatusCache

_WATCH_SECONDS = 2.0
# The largest share of a core for --watch: users share login nodes.
_WATCH_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class StatusOptions(cli.RunsOptions):
    """Show the state of runs."""

    run: Annotated[tuple[str, ...], cli.ANY_RUNS] = ()
    """Run directories or names. Default: all runs in --runs-dir."""
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
        print(f"no runs{whose} in {options.runs_dir}: start one with hpc submit -- train.py")
    else:
        rows = summaries(runs, details=bool(options.run))
        if options.json:
            cli.print_json([row.document() for row in rows])
        else:
            print_table(rows, details=bool(options.run))
    return 0


def _runs(options: StatusOptions) -> list[RunDir]:
    runs = cli.find_runs(options.run, options.runs_dir) if options.run else cli.all_runs(options.runs_dir)
    return [run for run in runs if not options.mine or other_owner(run.path) is None]


def _watch(options: StatusOptions) -> None:
    console, cache = Console(), StatusCache()
    if not console.is_terminal:
        raise UserError("--watch needs a terminal, and stdout is not one: leave it out, or use --json")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.process_time()
            rows = cache.summaries(_runs(options))
            drawn = watch_view(console, rows, details=bool(options.run), problem=cache.problem)
            live.update(drawn, refresh=True)
            time.sleep(max(_WATCH_SECONDS, (time.process_time() - began) / _WATCH_SHARE))


main = partial(cli.run, status, StatusOptions, "status")
