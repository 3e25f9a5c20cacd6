"""What `hpc status` draws for people: runs as a table, and what interrupted one. Pure; runs on the login node."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hpc.slurm.squeue import explain_reason
from hpc.status.run_view import TERMINAL, Summary

_STYLES = {"completed": "green", "running": "cyan", "pending": "yellow", "failed": "red", "cancelled": "magenta"}
_PARTS_SHOWN = 3
_NODES_SHOWN = 4
_DAY_SECONDS = 86400
# Columns that may fold, and how many characters they should have; and those that go first where there is no room.
_FOLDED = {"run": 24, "state": 24, "nodes": 24, "restarts": 16}
_DISPENSABLE = ("nodes", "epoch", "restarts", "img/s", "try", "accuracy", "loss", "step")


def view(rows: Sequence[Summary], width: int, *, details: bool) -> Group:
    """The table for people, as wide as their terminal; with `details`, of a single run also what interrupted it."""
    parts: list[Table | str] = [table(rows, width)]
    if details and len(rows) == 1:
        parts += ["", interruption_table(rows[0]["interruptions"])] if rows[0]["interruptions"] else []
        parts += [f"[yellow]warning:[/] {escape(warning)}" for warning in rows[0]["warnings"]]
    return Group(*parts)


def fitting(console: Console, rows: Sequence[Summary], *, details: bool, problem: str | None) -> Group:
    """The view, cut to the height of a terminal: more than that cannot be drawn over again."""
    most = min(console.height, max(len(rows), *(len(row["interruptions"]) for row in rows), 1))
    while True:
        shown = _most_telling(rows, most)
        left_out = len(rows) - len(shown)
        notes = [f"and {left_out} more, which have ended or are older: hpc status shows all"] if left_out else []
        notes += [f"[yellow]warning:[/] {escape(problem)}"] if problem else []
        drawn = Group(view(shown, console.width, details=details), *notes)
        lines = len(console.render_lines(drawn))
        excess = lines - (console.height - 1)
        if excess <= 0 or most == 1:
            return drawn
        # A run may take several lines, so not all that are in excess.
        most -= max(1, most * excess // (2 * lines))


def _most_telling(rows: Sequence[Summary], most: int) -> Sequence[Summary]:
    """Those runs, in their order, that have not ended, and then the newest; of a single one the last interruptions."""
    if len(rows) == 1:
        return [{**rows[0], "interruptions": rows[0]["interruptions"][-most:]}]
    ranked = sorted(range(len(rows)), key=lambda i: (rows[i]["state"] in TERMINAL, -i))
    return [rows[i] for i in sorted(ranked[:most])]


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")


def interruption_table(interruptions: list[dict[str, Any]]) -> Table:
    """What interrupted a run, the first one first, and what each cost."""
    drawn = _empty_table()
    for title in ("interrupted", "cause", "where"):
        drawn.add_column(title, no_wrap=True)
    for title in ("steps lost", "seconds"):
        drawn.add_column(title, justify="right", no_wrap=True)
    drawn.add_column("of which", overflow="fold")
    drawn.add_column("what it said", overflow="fold")
    for interruption in interruptions:
        drawn.add_row(*(escape(cell) for cell in _interruption_cells(interruption)))
    return drawn


def _interruption_cells(interruption: dict[str, Any]) -> list[str]:
    when = time.localtime(interruption["failed_at"] or interruption["noted"])
    rank = [] if interruption["rank"] is None else [f"rank {interruption['rank']}"]
    return [
        time.strftime("%m-%d %H:%M:%S", when),
        interruption["cause"],
        " ".join([*filter(None, [interruption["node"]]), *rank]) or "-",
        str(interruption["steps_lost"]),
        _or_dash(interruption["seconds"]["total"], "{:.1f}"),
        largest_parts(interruption["seconds"]) or "-",
        interruption["detail"] or "-",
    ]


def largest_parts(seconds: Mapping[str, float | None]) -> str:
    """The parts of a recovery that took longest."""
    known = [(name, part) for name, part in seconds.items() if name != "total" and part]
    longest = sorted(known, key=lambda part: -part[1])[:_PARTS_SHOWN]
    return ", ".join(f"{name} {part:.1f}" for name, part in longest)


def table(rows: Sequence[Summary], width: int) -> Table:
    """The runs, one a line, with the columns for which there is room."""
    cells = [_cells(row) for row in rows]
    drawn = _empty_table()
    titles = _titles_that_fit(cells, width)
    for title in titles:
        folds = title in _FOLDED
        drawn.add_column(title, justify="left" if folds else "right", overflow="fold", no_wrap=not folds)
    for row in cells:
        drawn.add_row(*(row[title] for title in titles))
    return drawn


def _titles_that_fit(cells: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    needed = {title: max(len(title), *(len(row[title]) for row in cells)) for title in (cells[0] if cells else ())}
    needed = {title: min(chars, _FOLDED.get(title, chars)) for title, chars in needed.items()}
    titles = list(needed)
    for title in _DISPENSABLE:
        if sum(needed[title] + 1 for title in titles) > width + 1:
            titles.remove(title)
    return titles


def _cells(row: Summary) -> dict[str, Text]:
    """By title; as Text, because rich would take the brackets of a list of nodes for its own."""
    waits = waiting(row)
    steps = _or_dash(row["step"]) + (f"/{row['total_steps']}" if row["step"] and row["total_steps"] else "")
    return {
        "run": Text(row["run"]),
        "state": Text.assemble((row["state"], _STYLES[row["state"]]), f": {waits}" if waits else ""),
        "nodes": Text(_nodes(row)),
        "restarts": Text(restarts(row)),
        "try": Text(_or_dash(row["attempt"])),
        "epoch": Text(_or_dash(row["epoch"])),
        "step": Text(steps),
        "img/s": Text(_or_dash(row["images_per_second"], "{:.0f}")),
        "loss": Text(_or_dash(row["train_loss"], "{:.4f}")),
        "accuracy": Text(_accuracy(row)),
        "ETA": Text(_duration(row["eta_seconds"])),
    }


def waiting(row: Summary) -> str:
    """Why a run does not train yet: what it waits for, or how far its data are; empty where nothing is known."""
    if row["staging"]:
        return _copying(row["staging"])
    starts_at = row["starts_at"]
    return ", ".join(
        filter(None, [explain_reason(row["reason"] or ""), starts_at and f"may start {_moment(starts_at)}"])
    )


def _copying(staging: Mapping[str, Any]) -> str:
    """`copying data, 34 %, 120 MB/s, 2:10 left`."""
    done, total, rate = (staging[key] for key in ("bytes_done", "bytes_total", "bytes_per_second"))
    left = staging["eta_seconds"]
    parts = [
        f"{staging['activity']} data",
        f"{done / total:.0%}" if total else f"{done / 1e6:.0f} MB",
        f"{rate / 1e6:.0f} MB/s",
        f"{_duration(left)} left" if left is not None else None,
    ]
    return ", ".join(filter(None, parts))


def _moment(seconds: float) -> str:
    """A time that is near: without its date if that goes without saying."""
    form = "%H:%M" if abs(seconds - time.time()) < _DAY_SECONDS / 2 else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def _nodes(row: Summary) -> str:
    names = list(dict.fromkeys(row["attempts"][-1]["members"])) if row["attempts"] else []
    many = len(names) > _NODES_SHOWN
    return f"{names[0]} ... {names[-1]} ({len(names)})" if many else " ".join(names) or "-"


def _accuracy(row: Summary) -> str:
    """On the test set, once it is known; until then in validation."""
    if row["test_accuracy"] is not None:
        return f"{row['test_accuracy']:.2%}"
    return "-" if row["val_accuracy"] is None else f"{row['val_accuracy']:.1%} val"


def restarts(row: Summary) -> str:
    """How often the run was interrupted, by cause."""
    return ", ".join(f"{cost['count']} {cause}" for cause, cost in row["recovery"].items()) or "-"


def _or_dash(value: object, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
