"""`hpc report`: write the page and the tables, once or until the runs have ended. Runs on the login node."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from hpc.base.errors import UserError
from hpc.commands import cli
from hpc.report.page import RELOAD_SECONDS
from hpc.report.writing import page_path, write_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions(cli.RunsOptions):
    """Write a self-contained HTML page about a run, or a comparison of several runs, with its tables as CSV files."""

    run: Annotated[tuple[str, ...], cli.RUNS]
    """Run directories or names."""
    output: Path | None = None
    """Directory for the page and the tables. Default: report/ in the run, or next to the runs that are compared."""
    watch: bool = False
    """Write the page again every 30 s until the runs have ended or you press Ctrl-C. An open page reloads itself."""


def report(options: ReportOptions) -> int:
    """Write the page and the tables, and print their paths; with --watch repeatedly, until all runs have ended."""
    if not options.run:
        raise UserError("no run is named: type hpc report NAME [NAME...]; hpc status lists the names")
    runs = list({run.path: run for run in cli.find_runs(options.run, options.runs_dir)}.values())
    path = page_path(runs, options.output)
    tables, ended = write_report(runs, path)
    if not options.json:
        print(f"{path}\n  next to it: {', '.join(tables)}", flush=True)
    while options.watch and not ended:
        time.sleep(RELOAD_SECONDS)
        tables, ended = write_report(runs, path)
    if options.json:
        cli.print_json({"report": str(path), "tables": [str(path.with_name(name)) for name in tables]})
    return 0


main = partial(cli.run, report, ReportOptions, "report")
