"""The measures of each size of a scaling study. Runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from hpc.base.files import last_json_line, number_in, read_json_lines
from hpc.base.program import values_of
from hpc.programs.program_kinds import program_of_run
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.status.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The measures of one size. None means unknown."""

    size: str
    """Nodes and GPUs per node, such as 2x4."""
    ranks: int
    state: str
    cause: str | None = None
    """The reason why the run failed or was not submitted."""
    batch_size: int | None = None
    """Images per step of all ranks."""
    images_per_second: float | None = None
    """The speed of all ranks: the median of the log's lines, without each attempt's first line."""
    steps_per_second: float | None = None
    """The pace of a script that reports no images per second: the median of its log's lines, or the mean of the counted
    steps."""
    speed: float | None = None
    """Images per second. If unknown, steps per second; with --mode weak times the ranks, as each has the same batch."""
    efficiency: float | None = None
    """Speed of a rank, relative to the smallest size."""
    data_wait_share: float | None = None
    """The share of the time in which a rank waits for data."""


def measure(size: str, ranks: int, run: RunDir, summary: Summary, *, is_weak: bool) -> Measures:
    """Return the measures of a run so far."""
    lines = list(read_json_lines(run.train_metrics))
    # Of the arguments of a user's script, the batch size is not known.
    batch_size = values_of(program_of_run(RunSpec.load(run))).get("batch-size")
    # The first line of an attempt is left out, because its times include the start.
    steady = [line for before, line in pairwise(lines) if before.get("attempt") == line.get("attempt")]
    images = median(speeds) if (speeds := _column(steady, "images_per_second")) else None
    pace = None if images else _pace(lines) or _counted_pace(run)
    return Measures(
        size=size,
        ranks=ranks,
        state=summary.state,
        cause=summary.detail or summary.reason if summary.state == "failed" else None,
        batch_size=batch_size,
        images_per_second=images,
        steps_per_second=pace,
        speed=images or (pace * (ranks if is_weak else 1) if pace else None),
        data_wait_share=_mean(steady, "data_wait_share"),
    )


def _pace(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the steps per second of a log; None if it has none."""
    paces = [
        steps / seconds
        for before, line in pairwise(lines)
        if before.get("attempt") == line.get("attempt")
        and (steps := _growth(before, line, "step")) > 0
        and (seconds := _growth(before, line, "time")) > 0
    ]
    return median(paces) if paces else None


def _counted_pace(run: RunDir) -> float | None:
    """Return the steps per second that the ranks of a run have counted since their last start; None if unknown."""
    last, firsts = last_json_line(run.counted_steps) or {}, History.load(run).of(FirstStep)
    if not firsts or last.get("attempt") != firsts[-1].attempt:
        return None
    first = {"step": firsts[-1].step, "time": firsts[-1].time}
    steps, seconds = _growth(first, {"step": last.get("steps")}, "step"), _growth(first, last, "time")
    return steps / seconds if steps > 0 and seconds > 0 else None


def _growth(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> float:
    first, last = number_in(before, name), number_in(after, name)
    return 0.0 if first is None or last is None else last - first


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for line in lines if (value := number_in(line, name)) is not None]


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _column(lines, name)
    return fmean(values) if values else None


def with_efficiency(measured: Sequence[Measures]) -> list[Measures]:
    """Return the measures with the speed of a rank, relative to the smallest measured size."""
    base = next((one.speed / one.ranks for one in measured if one.speed), None)
    return [replace(one, efficiency=one.speed / one.ranks / base if one.speed and base else None) for one in measured]
