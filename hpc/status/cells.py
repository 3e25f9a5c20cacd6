"""Formats the parts of a summary as text for `hpc status`, and tables that fit a terminal. Pure; login node."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from hpc.base.text import visible
from hpc.run.events.interruptions import Interruption
from hpc.slurm.squeue import explain_reason
from hpc.status.summary import Summary

STYLES = {"completed": "green", "running": "cyan", "pending": "yellow", "failed": "red", "cancelled": "magenta"}


def or_dash(value: object, form: str = "{}") -> str:
    """Format a value with `form`; None becomes a dash."""
    return "-" if value is None else form.format(value)


def clock(seconds: float | None) -> str:
    """Format a duration as 0:42, 2:10 or 1:02:10; None becomes a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def accuracy(row: Summary) -> str:
    """Format the accuracy of the test or, before the test, of the last validation, with the name of the split."""
    if row.test_accuracy is not None:
        return f"{row.test_accuracy:.2%} test"
    return or_dash(row.val_accuracy, "{:.1%} val")


def step(row: Summary) -> str:
    """Format the last logged step and the total, or the steps since the ranks of a script started as +57."""
    if row.counted_steps is not None:
        return f"+{row.counted_steps}"
    return or_dash(row.step) + (f"/{row.total_steps}" if row.step and row.total_steps else "")


def counted_steps(row: Summary) -> str:
    """Format the steps that a script has done since its ranks started; empty if they are not counted."""
    return "" if not row.counted_steps else f"{row.counted_steps} step{'s' * (row.counted_steps > 1)}"


def steps_lost(interruption: Interruption) -> str:
    """Format the steps that an interruption cost; if only their largest possible number is known, as ≤ 57."""
    if interruption.steps_lost_at_most is not None:
        return f"\N{LESS-THAN OR EQUAL TO} {interruption.steps_lost_at_most}"
    return or_dash(interruption.steps_lost)


def is_on_cpu(row: Summary) -> bool:
    """Return whether the ranks train on CPUs, so that `gpus` counts ranks."""
    return bool(row.device == "CPU")


def gpus(row: Summary) -> str:
    """Return the number of GPUs, and their type if the run asks for one; on CPUs, the number of ranks."""
    if is_on_cpu(row):
        return f"{row.world_size or row.gpus} ranks"
    return " ".join(filter(None, [or_dash(row.gpus), visible(row.gpu_type or "")]))


def interruptions(row: Summary) -> str:
    """Format the number of interruptions by cause."""
    counts = Counter(interruption.cause for interruption in row.interruptions)
    return ", ".join(f"{count} {visible(cause)}" for cause, count in counts.items())


def members(row: Summary) -> list[str]:
    """Return the nodes that train, or trained, in the last attempt. Spares are left out."""
    return list(dict.fromkeys(row.attempts[-1].members)) if row.attempts else []


def wait_reason(row: Summary) -> str:
    """Return why a run does not train yet: other runs, Slurm's reason or the staging; an empty text if unknown."""
    if staging := row.staging:
        done, total, rate = staging.bytes_done or 0.0, staging.bytes_total, staging.bytes_per_second or 0.0
        copied = f"{done / total:.0%}" if total else f"{done / 1e6:.0f} MB"
        left = "" if staging.eta_seconds is None else f", {clock(staging.eta_seconds)} left"
        return f"{staging.activity} data, {copied}, {rate / 1e6:.0f} MB/s{left}"
    if row.state == "pending" and row.waits_for:
        waits = [one.problem or f"waits until run {one.run} has {one.until}" for one in row.waits_for]
        return "; ".join(waits)
    reason, starts_at = explain_reason(row.reason or ""), row.starts_at
    if row.reason == "BeginTime" and starts_at:
        return f"held by Slurm until {_near_time(starts_at)} (--begin, or a requeue delay, which hpc supervise ends)"
    return ", ".join(filter(None, [reason, f"may start {_near_time(starts_at)}" if starts_at else ""]))


def _near_time(seconds: float) -> str:
    """Format a time of day, with its date if it is more than half a day away."""
    form = "%H:%M" if abs(seconds - time.time()) < 12 * 3600 else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def fitting_table(
    console: Console,
    rows: Sequence[Mapping[str, Text]],
    *,
    numbers: Collection[str],
    cut: tuple[str, int],
) -> Group:
    """Return a table of the first, most important columns: all that fit, but at least two.

    It consists of text, because rich takes 0.4 s to print a Table of 200 runs, and 0.1 s for the text. `rows` have the
    cells by title, the most important first; the cells are changed. Columns of `numbers` are aligned to the right.
    `cut` is the column whose text is cut if there is too little room, with its least width.
    """
    titles = list(rows[0]) if rows else [cut[0]]
    for cell in chain.from_iterable(row.values() for row in rows):
        cell.expand_tabs(1)
    widths = {title: max([cell_len(title), *(row[title].cell_len for row in rows)]) for title in titles}
    name, whole = cut[0], widths[cut[0]]
    widths[name] = min(whole, cut[1])
    shown = list(titles)
    while len(shown) > 2 and _total(shown, widths) > console.width:
        shown.pop()
    widths[name] = max(1, min(whole, widths[name] + console.width - _total(shown, widths)))

    def line(row: Mapping[str, Text]) -> Text:
        for title in shown:
            row[title].truncate(widths[title], overflow="ellipsis")
            row[title].align("right" if title in numbers else "left", widths[title])
        drawn = Text(" ").join(row[title] for title in shown)
        drawn.rstrip()
        return drawn

    header = {title: Text(title, style="bold") for title in shown}
    return Group(Text("\n", no_wrap=True, overflow="crop").join(map(line, [header, *rows])))


def _total(titles: Sequence[str], widths: Mapping[str, int]) -> int:
    return sum(widths[title] for title in titles) + len(titles) - 1
