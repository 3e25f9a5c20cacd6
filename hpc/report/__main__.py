"""The verb `report`: reads the runs, writes the CSV tables and then the page. Runs on the login node."""

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from hpc import cli
from hpc.core.errors import UserError
from hpc.core.files import write_atomic
from hpc.core.ownership import check_is_own
from hpc.report.gather import csv_tables, gather
from hpc.report.page import comparison_page, run_page
from hpc.status.__main__ import summaries


@dataclass(frozen=True, kw_only=True)
class ReportOptions(cli.RunsOptions):
    """Write one self-contained HTML page about a run, or a comparison of several, and its tables as CSV."""

    run: tyro.conf.Positional[tuple[str, ...]]
    """Run directories or names."""
    output: Path | None = None
    """Directory for the page and the tables; by default report/ in the run, or beside the runs that are compared."""


def report(options: ReportOptions) -> int:
    """Write the page and the tables, and print their paths."""
    if not options.run:
        raise UserError("no run: type hpc report NAME [NAME...]; hpc status lists the names")
    runs = list({run.path: run for run in (cli.find_run(name, options.runs_dir) for name in options.run)}.values())
    records = [gather(run, summary) for run, summary in zip(runs, summaries(runs), strict=True)]
    if options.output is None and len(runs) == 1:
        try:
            check_is_own(runs[0])  # another user's report/ may be a link to anywhere
        except UserError as error:
            raise UserError(f"{error}: use --output DIR") from error
    directory = runs[0].report.parent if len(runs) == 1 else runs[0].path.parent / "report"
    path = (options.output.expanduser().resolve() if options.output else directory) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {path.parent} ({error.strerror}): use another --output") from error
    tables, now = csv_tables(records), time.time()
    if len(records) == 1:
        page = run_page(records[0], list(tables), now)
    else:
        own_pages = [record.run.report for record in records]
        links = [os.path.relpath(page, path.parent) if page.exists() else None for page in own_pages]
        page = comparison_page(records, links, list(tables), now)
    for name, table in tables.items():
        write_atomic(path.with_name(name), table.to_csv(index=False))
    write_atomic(path, page)
    if options.json:
        cli.print_json({"report": str(path), "tables": [str(path.with_name(name)) for name in tables]})
    else:
        print(f"{path}\n  beside it: {', '.join(tables)}")
    return 0


main = partial(cli.run, report, ReportOptions, "report")

if __name__ == "__main__":
    sys.exit(main())
