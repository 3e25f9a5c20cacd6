"""Prints the table of runs and their interruptions, and waits for the end of a run. Runs on the login node."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.code_files import CodeFiles, parents, written_files
from hpc.run.rundir import RunDir
from hpc.status.cells import counted_steps, interruptions, wait_reason
from hpc.status.details import training_progress, view
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary, WrittenFiles

_WAIT_SECONDS, _PIPE_WIDTH = 1.0, 1000
# A script with more files is asked about its first ones alone.
_MOST_FILES = 10_000


def print_table(rows: list[Summary], *, details: bool) -> None:
    """Print the table of runs. In a file or pipe, the table has all its columns."""
    console = console_for()
    console.print(view(console, rows, details=details))


def console_for(pipe_width: int = _PIPE_WIDTH) -> Console:
    """Return a console as wide as the terminal or $COLUMNS; without either, as in a pipe, of `pipe_width` columns."""
    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = pipe_width
    return console


def summaries(runs: Sequence[RunDir], *, details: bool = False) -> list[Summary]:
    """Return one summary per run, from one call of squeue, in `details` with the files that the script has written.

    Print a warning on stderr if Slurm does not answer.
    """
    cache = StatusCache()
    rows = cache.summaries(runs)
    if cache.problem:
        print(visible(cache.problem), file=sys.stderr)
    return list(map(with_written_files, rows)) if details else rows


def with_written_files(row: Summary) -> Summary:
    """Return the summary with the files that the script has written; unchanged if the run records no copies."""
    run = RunDir(Path(row.run_dir))
    record = CodeFiles.load(run.code)
    if record is None:
        return row
    names = islice((name for name in written_files(run.code, record) if not name.endswith("/")), _MOST_FILES)
    made = parents((*record.copied, *record.linked))
    counts = Counter(_place(name, made) for name in names)
    # A path in the current directory is shown as a user types it there.
    here = f"{Path.cwd()}/"
    found = [
        WrittenFiles(path=f"{run.code}/{place}".removeprefix(here), files=files) for place, files in counts.items()
    ]
    return replace(row, written=tuple(found))


def _place(name: str, made: set[str]) -> str:
    """Return the highest directory of a file that the run itself has made, with a final slash; else the file."""
    parts = name.split("/")
    own = ("/".join(parts[:number]) for number in range(1, len(parts)))
    return next((f"{directory}/" for directory in own if directory not in made), name)


def wait_for_end(run: RunDir, answer: dict[str, Any] | None) -> int:
    """Wait for the end of a run. Return 0 if the run completed, 1 if it failed or was cancelled.

    With --json, `answer` is the submission's document: it is printed alone, with the final summary. Else it is None.
    """
    if answer is None:
        print(f"run {run.name} in {run.path}\nCtrl-C ends the wait, not the run.", flush=True)
    cache = StatusCache()
    with progress_line(Console()) if answer is None else nullcontext(lambda _row: None) as show:
        while (row := cache.summary(run)).state not in TERMINAL:
            show(row)
            time.sleep(_WAIT_SECONDS)
    row = with_written_files(row)
    if answer is not None:
        cli.print_json({**answer, "status": row.document()})
    else:
        print_table([row], details=True)
        if why := [text for text in (row.reason, row.detail) if text]:
            print(visible(": ".join([row.state, *why])), file=sys.stderr)
        print(f"logs     {run.logs}")
        cli.print_next(run, *(["report"] if row.state == "completed" else ["status", "logs"]))
    return 0 if row.state == "completed" else 1


@contextmanager
def progress_line(console: Console) -> Iterator[Callable[[Summary], None]]:
    """Yield a function that shows the progress of a run: in a terminal in one line that changes, else in new lines.

    A new line is printed for each epoch, attempt and interruption; without epochs also for each minute.
    """
    printed = set[object]()

    def print_line(row: Summary) -> None:
        part = row.epoch if row.epoch is not None else (row.step is None, time.monotonic() // 60)
        if (key := (row.state, row.attempt or 1, len(row.interruptions), part)) not in printed:
            printed.add(key)
            print(f"{time.strftime('%H:%M:%S')} {visible(progress(row))}", flush=True)

    if not console.is_terminal:
        yield print_line
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda row: live.update(Text(visible(progress(row)), no_wrap=True, overflow="ellipsis"), refresh=True)


def progress(row: Summary) -> str:
    """Return the progress of a run in one line."""
    if row.state == "pending":
        return ": ".join(filter(None, ["pending", wait_reason(row)]))
    known = ", ".join(
        filter(None, [counted_steps(row), row.last_output.line if row.last_output else training_progress(row)])
    )
    interrupted = f" (interrupted: {interruptions(row)})" if row.interruptions else ""
    return f"attempt {row.attempt or 1}: {known or 'starting'}{interrupted}"
