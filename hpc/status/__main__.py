"""`hpc status`: a table of runs; of a single run also its interruptions. Runs on the login node."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.live import Live

from hpc import cli
from hpc.core.errors import UserError
from hpc.core.rundir import RunDir
from hpc.status.run_view import Summary
from hpc.status.status_cache import StatusCache
from hpc.status.table import interruption_table, view, watch_view

_WATCH_SECONDS = 2.0
# The share of a core that --watch takes at most: users share login nodes.
_WATCH_SHARE = 0.1
_PIPE_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class StatusOptions(cli.Common):
    """Show the state of runs."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run directories or names; by default all below --runs-dir."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    watch: bool = False
    """Keep the table up to date until Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(status, StatusOptions, argv, "status")


def status(options: StatusOptions) -> int:
    """Print the table, or the contract's JSON."""
    runs = _runs(options)
    if options.json:
        cli.print_json(summaries(runs))
    elif not runs:
        print(f"no runs in {options.runs_dir}: start one with hpc submit --data fashion-mnist")
    elif options.watch:
        _watch(options)
    else:
        print_table(summaries(runs), details=bool(options.run))
    return 0


def _runs(options: StatusOptions) -> list[RunDir]:
    return [cli.find_run(name, options.runs_dir) for name in options.run] or cli.all_runs(options.runs_dir)


def print_table(rows: list[Summary], *, details: bool) -> None:
    """Print the table; into a file or pipe with all its columns."""
    console = _console()
    console.print(view(console, rows, details=details))


def print_interruptions(interruptions: list[dict[str, Any]]) -> None:
    """Print the interruptions of a run, and what each cost."""
    console = _console()
    console.print(interruption_table(console, interruptions))


def _console() -> Console:
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    return console


def summaries(runs: Sequence[RunDir]) -> list[Summary]:
    """One summary per run, with one call of squeue for all; a warning on stderr if Slurm does not answer."""
    cache = StatusCache()
    rows = cache.summaries(runs)
    if cache.problem:
        print(cache.problem, file=sys.stderr)
    return rows


def _watch(options: StatusOptions) -> None:
    """Redraw the table until Ctrl-C.

    Raises:
        UserError: there is no terminal to draw on.
    """
    console, cache = Console(), StatusCache()
    if not console.is_terminal:
        raise UserError("--watch needs a terminal, and stdout is none: leave it out, or use --json")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.process_time()
            rows = cache.summaries(_runs(options))
            drawn = watch_view(console, rows, details=bool(options.run), problem=cache.problem)
            live.update(drawn, refresh=True)
            time.sleep(max(_WATCH_SECONDS, (time.process_time() - began) / _WATCH_SHARE))


if __name__ == "__main__":
    sys.exit(main())
