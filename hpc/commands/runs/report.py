"""`hpc report`: write the page and the tables. Runs on the login node."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from hpc.base.errors import UserError
from hpc.base.files import expanded, write_atomic
from hpc.commands import cli
from hpc.report.gather import csv_tables, gather
from hpc.report.page import comparison_page, run_page
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.status.printing import summaries


@dataclass(frozen=True, kw_only=True)
class ReportOptions(cli.RunsOptions):
    """Write a self-contained HTML page about a run, or a comparison of several runs, with its tables as CSV files."""

    run: Annotated[tuple[str, ...], cli.RUNS]
    """Run directories or names."""
    output: Path | None = None
    """Directory for the page and the tables. Default: report/ in the run, or next to the runs that are compared."""


def report(options: ReportOptions) -> int:
    """Write the page and the tables, and print their paths."""
    runs = list({run.path: run for run in cli.find_runs(options.run, options.runs_dir)}.values())
    path = page_path(runs, options.output)
    tables = write_report(runs, path)
    if options.json:
        cli.print_json({"report": str(path), "tables": [str(path.with_name(name)) for name in tables]})
    else:
        print(f"{path}\n  next to it: {', '.join(tables)}")
    return 0


def page_path(runs: Sequence[RunDir], output: Path | None = None) -> Path:
    """Make the page's directory, and return the page's path. Raises UserError if that fails or is not allowed."""
    if output is None and len(runs) == 1:
        try:
            check_is_own(runs[0])  # another user's report/ may be a link to anywhere
        except UserError as error:
            raise UserError(f"{error}: use --output DIR") from error
    directory = runs[0].report.parent if len(runs) == 1 else runs[0].path.parent / "report"
    path = (expanded(output).resolve() if output else directory) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {path.parent} ({error.strerror}): use another --output") from error
    return path


def write_report(runs: Sequence[RunDir], path: Path) -> list[str]:
    """Write the tables and the page. Return the names of the tables."""
    records = [gather(run, summary) for run, summary in zip(runs, summaries(runs), strict=True)]
    tables = csv_tables(records)
    if len(records) == 1:
        page = run_page(records[0], list(tables), time.time())
    else:
        own_pages = [record.run.report for record in records]
        links = [os.path.relpath(page, path.parent) if page.exists() else None for page in own_pages]
        page = comparison_page(records, links, list(tables))
    for name, text in {**tables, path.name: [page]}.items():
        # Bytes of paths and arguments that are not UTF-8 become escapes.
        write_atomic(path.with_name(name), (part.encode(errors="backslashreplace").decode() for part in text))
    return list(tables)


main = partial(cli.run, report, ReportOptions, "report")
