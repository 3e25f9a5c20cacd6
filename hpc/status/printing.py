"""Prints the table of runs and their interruptions, and waits for the end of a run. Runs on the login node."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.events.downtime import Interruption
from hpc.run.rundir import RunDir
from hpc.status.cells import wait_reason
from hpc.status.details import interruption_table
from hpc.status.run_view import StatusCache
from hpc.status.script_files import with_written_files
from hpc.status.summary import TERMINAL, Summary
from hpc.status.table import view

_WAIT_SECONDS, _PIPE_WIDTH = 1.0, 1000


def print_table(rows: list[Summary], *, details: bool) -> None:
    """Print the table of runs. In a file or pipe, the table has all its columns."""
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


def summaries(runs: Sequence[RunDir], *, details: bool = False) -> list[Summary]:
    """Return one summary per run, from one call of squeue, in `details` with the files that the script has written.

    Print a warning on stderr if Slurm does not answer.
    """
    cache = StatusCache()
    rows = cache.summaries(runs)
    if cache.problem:
        print(visible(cache.problem), file=sys.stderr)
    return list(map(with_written_files, rows)) if details else rows


def wait_for_end(run: RunDir, answer: dict[str, Any] | None) -> int:
    """Wait for the end of a run. Return 0 if the run completed, 1 if it failed or was cancelled.

    With --json, `answer` is the submission's document: it is printed alone, with the final summary. Else it is None.
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
    row = with_written_files(row)
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
        counted = "" if row.counted_steps is None else f"{row.counted_steps} steps, "
        return f"attempt {row.attempt}: {counted}{last.line}"
    if row.counted_steps is not None:
        return f"attempt {row.attempt}: {row.counted_steps} steps"
    if row.step is None:
        return f"attempt {row.attempt or 1}: starting"
    # A user's script may log only some of these numbers.
    loss = None if row.train_loss is None else f"{row.train_loss:.4f}"
    known = {"epoch": row.epoch, "step": row.step, "loss": loss}
    words = [f"{name} {value}" for name, value in known.items() if value is not None]
    return f"attempt {row.attempt}: {' '.join(words)}"
