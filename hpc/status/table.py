"""What `hpc status` prints for people: a table of runs, and the interruptions of one. Pure; runs on the login node."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hpc.core.text import few, visible
from hpc.slurm.squeue import explain_reason
from hpc.status.run_view import TERMINAL, Summary

_STYLES = {"completed": "green", "running": "cyan", "pending": "yellow", "failed": "red", "cancelled": "magenta"}
_PARTS_SHOWN = 3
_HALF_DAY_SECONDS = 43200
_ANY_WIDTH = 10_000
# The most important columns first: a narrow terminal shows as many as fit, but at least the first two.
_COLUMNS = (
    "run", "state", "step", "loss", "accuracy", "ETA", "attempt", "img/s", "interruptions", "epoch", "nodes",
)  # fmt: skip
_INTERRUPTION_COLUMNS = ("time", "cause", "rank, node", "steps lost", "seconds lost", "message", "longest parts")
_FOLDED = frozenset({"run", "state", "interruptions", "nodes", "message", "longest parts"})
_NUMBERS = frozenset({"step", "loss", "accuracy", "ETA", "attempt", "img/s", "epoch", "steps lost", "seconds lost"})


def view(console: Console, rows: Sequence[Summary], *, details: bool) -> Group:
    """The table of runs; with `details`, of a single run also its device, warnings and interruptions."""
    parts: list[Table | str] = [_fitting_table(console, [_cells(row) for row in rows], _COLUMNS)]
    if details and len(rows) == 1:
        parts += [f"device: {escape(visible(rows[0]['device']))}"] if rows[0]["device"] else []
        parts += [f"[yellow]warning:[/] {escape(visible(warning))}" for warning in rows[0]["warnings"]]
        parts += budget_lines(rows[0]["budget"]) if rows[0]["state"] != "completed" else []
        parts += ["", interruption_table(console, rows[0]["interruptions"][::-1])] if rows[0]["interruptions"] else []
    return Group(*parts)


def budget_lines(budget: Mapping[str, Any]) -> list[str]:
    """How much a run has used of its budgets for failures, which docs/recovery.md explains."""
    lines = [
        f"failures without progress: {one['failures']} of {one['budget']} ({', '.join(one['causes'])})"
        for one in budget["used"]
    ]
    return [*lines, "the same failure twice in a row has ended the run"] if budget["same_failure_twice"] else lines


def watch_view(console: Console, rows: Sequence[Summary], *, details: bool, problem: str | None) -> Group:
    """The view for a terminal that cuts it to its height: runs that have not ended come first, then the newest."""
    newest_first = rows[::-1]
    ranked = sorted(newest_first, key=lambda row: row["state"] in TERMINAL)
    drawn = view(console, ranked[: console.height], details=details)
    return Group(f"[yellow]warning:[/] {escape(visible(problem))}", drawn) if problem else drawn


def _fitting_table(console: Console, rows: Sequence[Mapping[str, Text]], titles: Sequence[str]) -> Table:
    """A table of as many columns as the console has room for."""
    drawn = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")
    for title in titles:
        justify: JustifyMethod = "right" if title in _NUMBERS else "left"
        drawn.add_column(title, justify=justify, overflow="fold", no_wrap=title not in _FOLDED)
    for row in rows:
        drawn.add_row(*(row[title] for title in titles))
    unlimited = console.options.update_width(_ANY_WIDTH)
    while len(drawn.columns) > 2 and console.measure(drawn, options=unlimited).minimum > console.width:
        drawn.columns.pop()
    return drawn


def _cells(row: Summary) -> dict[str, Text]:
    """By title; as Text, because rich would parse the brackets of a list of nodes as markup."""
    wait = wait_reason(row)
    names = list(dict.fromkeys(row["attempts"][-1]["members"])) if row["attempts"] else []
    nodes = few(names, " ")
    interruptions = ", ".join(f"{cost['count']} {cause}" for cause, cost in row["recovery"].items())
    tested = row["test_accuracy"] is not None
    accuracy = f"{row['test_accuracy']:.2%}" if tested else _or_dash(row["val_accuracy"], "{:.1%} val")
    steps = _or_dash(row["step"]) + (f"/{row['total_steps']}" if row["step"] and row["total_steps"] else "")
    return {
        "run": Text(visible(row["run"])),
        "state": Text.assemble((row["state"], _STYLES[row["state"]]), visible(f": {wait}") if wait else ""),
        "nodes": Text(visible(nodes) or "-"),
        "interruptions": Text(visible(interruptions) or "-"),
        "attempt": Text(_or_dash(row["attempt"])),
        "epoch": Text(_or_dash(row["epoch"])),
        "step": Text(steps),
        "img/s": Text(_or_dash(row["images_per_second"], "{:.0f}")),
        "loss": Text(_or_dash(row["train_loss"], "{:.4f}")),
        "accuracy": Text(accuracy),
        "ETA": Text("-" if row["eta_seconds"] is None else _clock(row["eta_seconds"])),
    }


def interruption_table(console: Console, interruptions: Sequence[dict[str, Any]]) -> Table:
    """The interruptions of a run, and what each cost."""
    rows = list[dict[str, Text]]()
    for one in interruptions:
        rank = None if one["rank"] is None else f"rank {one['rank']}"
        cells = (
            time.strftime("%m-%d %H:%M:%S", time.localtime(one["failed_at"] or one["recorded_at"])),
            one["cause"],
            ", ".join(filter(None, [rank, one["node"]])) or "-",
            _or_dash(one["steps_lost"]),
            _or_dash(one["seconds"]["total"], "{:.1f}"),
            one["detail"] or "-",
            largest_parts(one["seconds"]) or "-",
        )
        rows.append(dict(zip(_INTERRUPTION_COLUMNS, (Text(visible(cell)) for cell in cells), strict=True)))
    return _fitting_table(console, rows, _INTERRUPTION_COLUMNS)


def largest_parts(seconds: Mapping[str, float | None]) -> str:
    """The parts of a recovery that took longest."""
    known = [(name, part) for name, part in seconds.items() if name != "total" and part]
    longest = sorted(known, key=lambda part: -part[1])[:_PARTS_SHOWN]
    return ", ".join(f"{name} {part:.1f}" for name, part in longest)


def wait_reason(row: Summary) -> str:
    """Why a run does not train yet: Slurm's reason, or the progress of staging; empty if neither is known."""
    if staging := row["staging"]:
        done, total, rate = (staging[key] for key in ("bytes_done", "bytes_total", "bytes_per_second"))
        copied = f"{done / total:.0%}" if total else f"{done / 1e6:.0f} MB"
        left = "" if staging["eta_seconds"] is None else f", {_clock(staging['eta_seconds'])} left"
        return f"{staging['activity']} data, {copied}, {rate / 1e6:.0f} MB/s{left}"
    reason, starts_at = explain_reason(row["reason"] or ""), row["starts_at"]
    if row["reason"] == "BeginTime" and starts_at:
        return f"held by Slurm until {_near_time(starts_at)} (requeue delay or --begin)"
    return ", ".join(filter(None, [reason, starts_at and f"may start {_near_time(starts_at)}"]))


def _near_time(seconds: float) -> str:
    """A time of day, with its date if it is more than half a day away."""
    form = "%H:%M" if abs(seconds - time.time()) < _HALF_DAY_SECONDS else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def _or_dash(value: object, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _clock(seconds: float) -> str:
    """A duration as 0:42, 2:10 or 1:02:10."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
