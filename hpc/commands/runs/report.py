"""`hpc report`: write the page and the tables. Runs on the login node."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from hpc.base.errors import UserError
from hpc.commands import cli
from hpc.report.writing import page_path, write_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions(cli.RunsOptions):
    """Write a self-contained HTML page about a run, or a comparison of several runs, with its tables as CSV files."""

    run: Annotated[tuple[str, ...], cli.RUNS]
    """Run directories or names."""
    output: Path | None = None
    """Directory for the page and the tables. Default: report/ in the run, or next to the runs that are compared."""


def report(options: ReportOptions) -> int:
    """Write the page and the tables, and print their paths."""
    if not options.run:
        raise UserError("no run is named: type hpc report NAME [NAME...]; hpc status lists the names")
    runs = list({run.path: run for run in cli.find_runs(options.run, options.runs_dir)}.values())
    path = page_path(runs, options.output)
    tables = write_report(runs, path)
    if options.json:
        cli.print_json({"report": str(path), "tables": [str(path.with_name(name)) for name in tables]})
    else:
        print(f"{path}\n  next to it: {', '.join(tables)}")
    return 0


main = partial(cli.run, report, ReportOptions, "report")
