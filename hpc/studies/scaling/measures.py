"""The measures of each size of a scaling study, and the conclusions from them. Runs on the login node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from hpc.base.files import last_json_line, number_in, read_json_lines
from hpc.base.program import values_of
from hpc.programs.program_kinds import program_of_run
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep, TrainStarted
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.status.summary import Summary
from hpc.studies.scaling.scaling_dir import Mode, Size

# Added ranks pay if each brings at least `_PAYS` of an earlier rank's speed. A wait is reported if it takes at least
# `_NOTABLE` of the time.
_PAYS, _NOTABLE = 0.5, 0.1
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The measures of one size. None means unknown."""

    size: Size
    run: str
    state: str
    cause: str | None = None
    """The reason why the run failed or was not submitted."""
    lr: float | None = None
    """The highest learning rate."""
    batch_size: int | None = None
    """Images per step of all ranks."""
    steps_per_epoch: int | None = None
    epoch_seconds: float | None = None
    """The mean duration of an epoch."""
    epochs: float | None = None
    """The number of epochs trained so far, which may be a fraction."""
    images_per_second: float | None = None
    """The speed of all ranks: the median of the log's lines, without each attempt's first line."""
    steps_per_second: float | None = None
    """The pace of a script that reports no images per second: the median of its log's lines, or the mean of the counted
    steps."""
    speed: float | None = None
    """Images per second. If unknown, steps per second; with --mode weak times the ranks, as each has the same batch."""
    val_loss: float | None = None
    """The best validation loss."""
    test_loss: float | None = None
    test_accuracy: float | None = None
    data_wait_share: float | None = None
    """The share of the time in which a rank waits for data."""
    allreduce_wait_share: float | None = None
    """The share of the time in which rank 0 has computed its gradients and waits for the all-reduce."""
    allreduce_seconds: float | None = None
    """The median duration of a step's all-reduce."""
    gradient_bytes: int | None = None
    """Bytes that the all-reduce of a step reduces."""
    gpu_hours: float | None = None
    train_loss: Curve = ()
    """The training loss by seconds of training."""
    validation_loss: Curve = ()

    @property
    def bandwidth(self) -> float | None:
        """The least number of bytes per second that each rank sends, if the all-reduce is a ring.

        A ring sends 2 (n - 1) / n times the gradients: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations" (2009).
        """
        if not self.allreduce_seconds or not self.gradient_bytes:
            return None
        return 2 * (self.size.ranks - 1) / self.size.ranks * self.gradient_bytes / self.allreduce_seconds


def measure(size: Size, mode: Mode, run: RunDir, summary: Summary) -> Measures:
    """Return the measures of a run so far."""
    lines, evaluations = list(read_json_lines(run.train_metrics)), list(read_json_lines(run.eval_metrics))
    # Of the arguments of a user's script, neither the epochs nor the batch size is known.
    flags = values_of(program_of_run(RunSpec.load(run)))
    history = History.load(run)
    started = history.of(TrainStarted)
    # The first line of an attempt is left out, because its times include the start.
    steady = [line for before, line in pairwise(lines) if before.get("attempt") == line.get("attempt")]
    last = lines[-1] if lines else {}
    step, seconds, epoch = (number_in(last, name) for name in ("step", "train_seconds", "epoch"))
    of_epoch = round((started[-1].total_steps or 0) / flags["epochs"]) if started and "epochs" in flags else None
    epochs = step / of_epoch if step and of_epoch else epoch
    test = _last(evaluations, "test")
    validation = [line for line in evaluations if line.get("split") == "val" and number_in(line, "loss") is not None]
    images = _middle(steady, "images_per_second")
    pace = None if images else _pace(lines) or _counted_pace(run, history)
    return Measures(
        size=size, run=run.name, state=summary.state,
        cause=summary.detail or summary.reason if summary.state == "failed" else None,
        lr=max(_column(lines, "lr"), default=None),
        batch_size=flags.get("batch-size"), steps_per_epoch=of_epoch,
        epoch_seconds=seconds / epochs if seconds and epochs else None, epochs=epochs,
        images_per_second=images, steps_per_second=pace,
        speed=images or (pace * (size.ranks if mode == "weak" else 1) if pace else None),
        val_loss=min(_column(validation, "loss"), default=None),
        test_loss=number_in(test, "loss"), test_accuracy=number_in(test, "accuracy"),
        data_wait_share=_mean(steady, "data_wait_share"),
        allreduce_wait_share=_mean(steady, "allreduce_wait_share"),
        allreduce_seconds=_middle(steady, "allreduce_seconds"),
        gradient_bytes=started[-1].gradient_bytes if started else None,
        gpu_hours=(summary.gpu_hours or {}).get("allocated"), train_loss=_curve(lines, lines),
        validation_loss=_curve(validation, lines),
    )  # fmt: skip


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


def _counted_pace(run: RunDir, history: History) -> float | None:
    """Return the steps per second that the ranks of a run have counted since their last start; None if unknown."""
    last, firsts = last_json_line(run.counted_steps) or {}, history.of(FirstStep)
    if not firsts or last.get("attempt") != firsts[-1].attempt:
        return None
    first = {"step": firsts[-1].step, "time": firsts[-1].time}
    steps, seconds = _growth(first, {"step": last.get("steps")}, "step"), _growth(first, last, "time")
    return steps / seconds if steps > 0 and seconds > 0 else None


def _growth(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> float:
    first, last = number_in(before, name), number_in(after, name)
    return 0.0 if first is None or last is None else last - first


def efficiency(measured: Sequence[Measures]) -> dict[Size, float]:
    """Return the speed of a rank in each measured size, relative to the smallest measured size."""
    per_rank = {one.size: one.speed / one.size.ranks for one in measured if one.speed}
    base = next(iter(per_rank.values()), 1.0)
    return {size: value / base for size, value in per_rank.items()}


def causes(measured: Sequence[Measures]) -> list[str]:
    """Return a sentence for each size whose run failed or was refused."""
    return [f"{one.size.name} is {one.state}: {one.cause}" for one in measured if one.cause]


def conclusions(measured: Sequence[Measures]) -> list[str]:
    """Return sentences: up to which size more ranks pay, what limits them, and whether few or many nodes are faster."""
    known = [one for one in measured if one.speed]
    fastest = list[Measures]()
    for one in known:  # of sizes with the same number of ranks, keep only the fastest
        if fastest and fastest[-1].size.ranks == one.size.ranks:
            fastest[-1] = max(fastest[-1], one, key=_speed)
        else:
            fastest.append(one)
    if len(fastest) < 2:
        return []
    found = list[str]()
    limit = next((pair for pair in pairwise(fastest) if not _pays(*pair)), None)
    if limit is None:
        largest = fastest[-1]
        share = efficiency(known)[largest.size]
        found.append(
            f"More ranks pay up to the largest size, {_words(largest.size)}: each rank has {share:.0%} of its speed "
            "in the smallest size."
        )
        found += _reason(largest)
    else:
        before, after = limit
        ratio = _speed(after) / _speed(before)
        gain = f"{ratio:.2f} times as fast, not {after.size.ranks / before.size.ranks:.3g} times"
        loss = f"slower, at {ratio:.0%} of that speed"
        found.append(
            f"More ranks pay up to {_words(before.size)}: {_words(after.size)} are {gain if ratio >= 1 else loss}."
        )
        is_known = after.data_wait_share is not None or after.allreduce_wait_share is not None
        found += _reason(after) or ["They wait neither for data nor for each other: type hpc doctor."] * is_known
    return found + _up_or_out(known)


def _pays(before: Measures, after: Measures) -> bool:
    gain = _speed(after) / _speed(before) - 1
    return gain >= _PAYS * (after.size.ranks / before.size.ranks - 1)


def _reason(one: Measures) -> list[str]:
    """Return what the ranks of a size wait for, and what helps."""
    waits = {"all-reduce": one.allreduce_wait_share or 0.0, "data": one.data_wait_share or 0.0}
    name, share = max(waits.items(), key=lambda item: item[1])
    if share < _NOTABLE:
        return []
    if name == "data":
        return [f"They wait {share:.0%} of the time for data: use more --num-workers and CPUs, or --pack on."]
    cost = ""
    if one.bandwidth is not None and one.gradient_bytes is not None:
        cost = (
            f" of {one.gradient_bytes / 1e6:.3g} MB of gradients a step ({one.allreduce_seconds:.3g} s, at least "
            f"{one.bandwidth / 1e6:.3g} MB/s)"
        )
    helps = "more images per rank (--batch-size, --grad-accum-steps), --compress-gradients bf16, more GPUs per node"
    return [f"They wait {share:.0%} of the time for the all-reduce{cost}. What helps: {helps}."]


def _up_or_out(known: Sequence[Measures]) -> list[str]:
    """For each number of ranks that was tried on few and on many nodes, return a sentence that says which is faster."""
    found = list[str]()
    for ranks in sorted({one.size.ranks for one in known}):
        alike = [one for one in known if one.size.ranks == ranks]
        few, many = alike[0], alike[-1]
        if few.size.nodes < many.size.nodes:
            slow, fast = sorted((many, few), key=_speed)
            ratio, advice = _speed(fast) / _speed(slow), "scale up" if fast is few else "scale out"
            found.append(f"{ranks} ranks: {fast.size.name} is {ratio:.2f} times as fast as {slow.size.name}: {advice}.")
    return found


def _words(size: Size) -> str:
    return f"{size.ranks} rank{'s' * (size.ranks > 1)} ({size.name})"


def _speed(one: Measures) -> float:
    return one.speed or 0.0


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for line in lines if (value := number_in(line, name)) is not None]


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _column(lines, name)
    return fmean(values) if values else None


def _middle(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _column(lines, name)
    return median(values) if values else None


def _last(evaluations: Sequence[Mapping[str, Any]], split: str) -> Mapping[str, Any]:
    return next((line for line in reversed(evaluations) if line.get("split") == split), {})


def _curve(points: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Return losses by seconds of training. An evaluation's seconds come from the training's line of the same step."""
    seconds = {line.get("step"): number_in(line, "train_seconds") for line in lines}
    found = list[tuple[float, float]]()
    for point in points:
        at, loss = number_in(point, "train_seconds") or seconds.get(point.get("step")), number_in(point, "loss")
        if at is not None and loss is not None:
            found.append((at, loss))
    return tuple(found)
