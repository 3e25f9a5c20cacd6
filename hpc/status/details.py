"""Formats what `hpc status` prints: a table of runs, or a line for each known fact about one run. Pure; login node."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hpc.base.text import few, visible
from hpc.run.events.interruptions import Interruption
from hpc.status import cells
from hpc.status.summary import TERMINAL, Summary, TrackerState

_RUN_NUMBERS = frozenset({"job", "step", "loss", "accuracy", "ETA", "elapsed", "attempt", "img/s", "epoch"})
# The least width of a run's name: names often differ only at their ends.
_LEAST_NAME = 40
_NUMBERS = frozenset({"lost steps", "lost time"})
_LEAST_MESSAGE = 16


def view(console: Console, rows: Sequence[Summary], *, details: bool) -> Group:
    """Return the table of runs, their waits and damage. With `details`, show a single run in full."""
    if details and len(rows) == 1:
        return run_details(console, rows[0])
    table = cells.fitting_table(console, list(map(_cells, rows)), numbers=_RUN_NUMBERS, cut=("run", _LEAST_NAME))
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
    """Return cells by title, the most important first.

    They are Text, because rich would parse the brackets of a list of nodes as markup.
    """
    texts = {
        "run": row.run,
        "state": row.state,
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
    found = _as_text(texts)
    found["state"].stylize(cells.STYLES[row.state])
    return found


def _as_text(texts: Mapping[str, str]) -> dict[str, Text]:
    return {title: Text(visible(text)) for title, text in texts.items()}


# --- one run ---


def run_details(console: Console, row: Summary) -> Group:
    """Return a view of a run: state, place, progress, cost, damage, warnings, and interruptions, latest first."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in _facts(row).items():
        style = cells.STYLES[row.state] if name == "state" else ""
        facts.add_row(Text(name, style="bold"), Text(visible(text), style=style, overflow="fold"))
    parts: list[RenderableType] = [facts]
    parts += ["", Text("\n".join(visible(line) for line in row.traceback), style="dim")] if row.traceback else []
    parts += [f"[yellow]warning:[/] {escape(visible(warning))}" for warning in [*row.damaged, *row.warnings]]
    if row.interruptions:
        parts += ["", interruption_table(console, row.interruptions[::-1])]
    return Group(*parts)


def _facts(row: Summary) -> dict[str, str]:
    facts = {
        "run": row.run,
        "directory": row.run_dir,
        "state": ": ".join(filter(None, [row.state, cells.wait_reason(row)])),
        "job": _joined(row.job_id, _named("partition ", row.partition), _named("attempt ", row.attempt)),
        "new job": row.why_new_job or "",
        "nodes": few(cells.members(row)),
        "on CPUs" if cells.is_on_cpu(row) else "GPUs": "" if row.gpus is None else cells.gpus(row),
        "device": "" if cells.is_on_cpu(row) else row.device or "",
        "progress": _joined(
            f"{cells.counted_steps(row)} since the ranks started",
            _named("", row.steps_per_second, "{:.3g} steps/s"),
        )
        if row.counted_steps
        else "unknown: the script reports no step (docs/how-to/own-script.md)"
        if row.last_output
        else training_progress(row),
        "last output": _last_output(row),
        "snapshot": _joined(
            _named("", row.snapshot_seconds, "{:.0f} s ago"),
            _named("", row.snapshot_bytes and row.snapshot_bytes / 1e6, "{:,.1f} MB of each node's memory"),
        ),
        "accuracy": _joined(
            _named("", row.val_accuracy, "{:.2%} val"),
            _named("", row.test_accuracy, "{:.2%} test"),
            _named("", row.best_test_accuracy, "{:.2%} test of the best model"),
        ),
        "time": _time(row),
        "rank-hours" if cells.is_on_cpu(row) else "GPU-hours": _named("", row.gpu_hours, "{:.3g}"),
        "interrupted": cells.interruptions(row) or ("0" if row.state == "completed" else ""),
        "model": row.model or "",
        "metrics": "; ".join(map(_tracker, row.trackers)),
        "written": written_line(row),
        "ended by": row.detail or "",
        "budget": "; ".join(row.budget) if row.state != "completed" else "",
    }
    return {name: text for name, text in facts.items() if text}


def training_progress(row: Summary) -> str:
    """Return the progress of a training in one line. A user's script may report only some of these numbers."""
    return _joined(
        _named("epoch ", row.epoch),
        _named("step ", row.step and cells.step(row)),
        _named("loss ", row.train_loss, "{:.4f}"),
        _named("", row.images_per_second, "{:.0f} images/s"),
        _duration(row.eta_seconds, "{} left"),
    )


def _joined(*texts: str | None) -> str:
    return ", ".join(filter(None, texts))


def _named(name: str, value: object, form: str = "{}") -> str:
    return "" if value is None else name + form.format(value)


def _duration(seconds: float | None, form: str) -> str:
    return "" if seconds is None else form.format(cells.clock(seconds))


def _last_output(row: Summary) -> str:
    """Return the last line of a script that reports no step and, while the run goes on, the line's age."""
    if not (last := row.last_output):
        return ""
    ago = cells.clock(max(0.0, time.time() - last.time))
    return last.line + ("" if row.state in TERMINAL else f" ({ago} ago)")


def written_line(row: Summary) -> str:
    """Return the files that a script has written into its copy of the user's directory, in one line."""
    places = [
        f"{one.path} ({one.files} file{'' if one.files == 1 else 's'})" if one.path.endswith("/") else one.path
        for one in row.written or ()
    ]
    return few(places)


def _time(row: Summary) -> str:
    """Return the time since the first start, its productive share, and the time in the queue."""
    return _joined(
        _duration(row.elapsed_seconds, "{} since its first start"),
        _named("", row.goodput, "{:.0%} of it productive"),
        _duration(row.queue_seconds, "{} in the queue"),
    )


def _tracker(one: TrackerState) -> str:
    if one.problem is not None:
        return f"not sent to {one.tracker} ({one.problem}): type hpc sync"
    return f"at {one.tracker}" + (f", {one.url}" if one.url else "")


def interruption_table(console: Console, interruptions: Sequence[Interruption]) -> Group:
    """Return a table of a run's interruptions and their costs. Messages that are too long are cut."""
    rows = list[dict[str, Text]]()
    for one in interruptions:
        rank = None if one.rank is None else f"rank {one.rank}"
        texts = {
            "time": time.strftime("%m-%d %H:%M:%S", time.localtime(one.failed_at or one.recorded_at)),
            "cause": one.cause,
            "lost steps": cells.steps_lost(one),
            "lost time": cells.or_dash(one.seconds["total"], "{:.1f} s"),
            "rank, node": ", ".join(filter(None, [rank, one.node])) or "-",
            "message": one.detail or "-",
            "longest parts": largest_parts(one.seconds) or "-",
        }
        rows.append(_as_text(texts))
    return cells.fitting_table(console, rows, numbers=_NUMBERS, cut=("message", _LEAST_MESSAGE))


def largest_parts(seconds: Mapping[str, float | None]) -> str:
    """Return the three longest parts of a recovery, each with its seconds."""
    known = [(name, part) for name, part in seconds.items() if name != "total" and part]
    longest = sorted(known, key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {part:.1f}" for name, part in longest)
