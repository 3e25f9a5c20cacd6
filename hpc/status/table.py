"""Formats what `hpc status` prints about several runs: a table, waits, damage. Pure; runs on the login node."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from hpc.base.text import few, visible
from hpc.status import cells
from hpc.status.details import run_details
from hpc.status.summary import TERMINAL, Summary

# Columns, the most important first.
_COLUMNS = (
    *("run", "state", "job", "step", "accuracy", "ETA", "loss", "elapsed", "GPUs", "attempt", "img/s", "partition"),
    *("interruptions", "epoch", "nodes"),
)
_NUMBERS = frozenset({"job", "step", "loss", "accuracy", "ETA", "elapsed", "attempt", "img/s", "epoch"})
# The least width of a run's name: names often differ only at their ends.
_LEAST_NAME = 40


def view(console: Console, rows: Sequence[Summary], *, details: bool) -> Group:
    """Return the table of runs, their waits and damage. With `details`, show a single run in full."""
    if details and len(rows) == 1:
        return run_details(console, rows[0])
    table = cells.fitting_table(
        console, [_cells(row) for row in rows], _COLUMNS, numbers=_NUMBERS, cut=("run", _LEAST_NAME)
    )
    return Group(table, *_reasons(rows), *_damage(rows))


def watch_view(console: Console, rows: Sequence[Summary], *, details: bool, problem: str | None) -> Group:
    """Return the view of --watch. Runs that go on come first, newer before older: a terminal cuts off the end."""
    newest_first = rows[::-1]
    ranked = sorted(newest_first, key=lambda row: row.state in TERMINAL)
    drawn = view(console, ranked[: console.height], details=details)
    return Group(f"[yellow]warning:[/] {escape(visible(problem))}", drawn) if problem else drawn


def _reasons(rows: Sequence[Summary]) -> list[str]:
    """Return a line for each reason why runs do not train yet, with the names of the runs."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if wait := cells.wait_reason(row):
            names.setdefault(f"{row.state}: {wait}", []).append(row.run)
    return [escape(visible(f"{few(alike)}: {reason}")) for reason, alike in names.items()]


def _damage(rows: Sequence[Summary]) -> list[str]:
    """Return a line for each damaged run, with its first damage and the number of others."""
    found = [(row.run, row.damaged) for row in rows if row.damaged]
    more = {run: f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else "" for run, damaged in found}
    return [escape(visible(f"{run}: {damaged[0]}{more[run]}")) for run, damaged in found]


def _cells(row: Summary) -> dict[str, Text]:
    """Return cells by title. They are Text, because rich would parse the brackets of a list of nodes as markup."""
    texts = {
        "run": row.run,
        "job": cells.or_dash(row.job_id),
        "step": cells.step(row),
        "accuracy": cells.accuracy(row),
        "ETA": cells.clock(row.eta_seconds),
        "loss": cells.or_dash(row.train_loss, "{:.4f}"),
        "elapsed": cells.clock(row.elapsed_seconds),
        "GPUs": cells.gpus(row),
        "attempt": cells.or_dash(row.attempt),
        "img/s": cells.or_dash(row.images_per_second, "{:.0f}"),
        "partition": cells.or_dash(row.partition),
        "interruptions": cells.interruptions(row) or "-",
        "epoch": cells.or_dash(row.epoch),
        "nodes": few(cells.members(row), " ") or "-",
    }
    state = Text(row.state, style=cells.STYLES[row.state])
    return {"state": state, **{title: Text(visible(text)) for title, text in texts.items()}}
