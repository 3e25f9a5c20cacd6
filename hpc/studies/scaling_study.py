"""A scaling study, which has a run for each number of nodes and GPUs. Runs on the login node."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any, Literal

from hpc.base.errors import UserError
from hpc.base.files import last_json_line, number_in, read_json_lines
from hpc.base.program import values_of
from hpc.programs.program_kinds import program_of_run
from hpc.run.events.history import History
from hpc.run.events.kinds import FirstStep
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm.cancellation import cancel_run
from hpc.status.cells import or_dash
from hpc.status.summary import Summary
from hpc.studies.group import GroupDir, GroupSpec, Member
from hpc.studies.study import Results, Study

Mode = Literal["weak", "strong"]
_NOT_MEASURED = (
    "no run has a measured speed: each must train for some seconds, and a script must step an optimizer of torch or "
    "report its steps; hpc status shows the runs"
)


# --- the measures of a size ---


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
    pace = None if images else _pace(lines) or _pace(_counted(run))
    return Measures(
        size=size,
        ranks=ranks,
        state=summary.state,
        cause=summary.detail or summary.reason if summary.state == "failed" else None,
        batch_size=batch_size,
        images_per_second=images,
        steps_per_second=pace,
        speed=images or (pace * (ranks if is_weak else 1) if pace else None),
        data_wait_share=fmean(waits) if (waits := _column(steady, "data_wait_share")) else None,
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


def _counted(run: RunDir) -> list[dict[str, Any]]:
    """Return the first and the last step that the ranks of a run have counted since their last start, as log lines."""
    last = last_json_line(run.counted_steps) or {}
    firsts = History.load(run).of(FirstStep)[-1:]
    steps = [{"attempt": one.attempt, "step": one.step, "time": one.time} for one in firsts]
    return [*steps, {**last, "step": last.get("steps")}]


def _growth(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> float:
    first, last = number_in(before, name), number_in(after, name)
    return 0.0 if first is None or last is None else last - first


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for line in lines if (value := number_in(line, name)) is not None]


def with_efficiency(measured: Sequence[Measures]) -> list[Measures]:
    """Return the measures with the speed of a rank, relative to the smallest measured size."""
    base = next((one.speed / one.ranks for one in measured if one.speed), None)
    return [replace(one, efficiency=one.speed / one.ranks / base if one.speed and base else None) for one in measured]


_ROWS: dict[str, Callable[[Measures], str]] = {
    "ranks": lambda one: str(one.ranks),
    "state": lambda one: one.state,
    "global batch": lambda one: or_dash(one.batch_size),
    "images per second": lambda one: or_dash(one.images_per_second, "{:.0f}"),
    "steps per second": lambda one: or_dash(one.steps_per_second, "{:.3g}"),
    "scaling efficiency": lambda one: or_dash(one.efficiency, "{:.0%}"),
    "waiting for data": lambda one: or_dash(one.data_wait_share, "{:.1%}"),
}


# --- the sizes of a study, and their runs ---


@dataclass(frozen=True, kw_only=True)
class Size:
    """The resources of one run of the study."""

    nodes: int
    gpus: int
    """GPUs per node; 0 means one rank per node on its CPUs."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * max(1, self.gpus)

    @property
    def name(self) -> str:
        """The name of the run, such as `2x4` for 2 nodes with 4 GPUs each."""
        return f"{self.nodes}x{self.gpus}"


@dataclass(frozen=True, kw_only=True)
class ScalingSpec(GroupSpec):
    """The settings of a study."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    gpu_type: str | None
    minutes: float
    """Minutes of training of each run."""
    mode: Mode
    """`weak` means that the global batch grows with the ranks, `strong` that all sizes have the same global batch."""

    @property
    def sizes(self) -> Sequence[Size]:
        """All combinations of nodes and GPUs per node, sorted by the number of ranks, then of nodes."""
        sizes = [Size(nodes=nodes, gpus=gpus) for nodes, gpus in product(self.nodes, self.gpus)]
        return sorted(sizes, key=lambda size: (size.ranks, size.nodes))

    def growth(self, size: Size) -> float:
        """Return the batch of all ranks together, as a multiple of the smallest size's."""
        return size.ranks / self.sizes[0].ranks if self.mode == "weak" else 1.0

    def check(self) -> None:
        """Raise UserError if a number is not allowed."""
        super().check()
        if not self.minutes > 0:
            raise UserError(f"--minutes is {self.minutes:g}: use more than 0")
        if len(self.sizes) == 1:
            raise UserError("there is one size only: add more, such as --nodes 1 2 4")


class ScalingDir(GroupDir[ScalingSpec]):
    """The files of a study, by name."""

    KIND, TITLE = "scaling", "scaling study"
    FIRST_FLAG = "--nodes 1 2 4"
    SPEC = ScalingSpec


class ScalingStudy(Study[ScalingSpec]):
    """Starts and follows the runs of one study. A member's name is that of its size."""

    def __init__(self, group: ScalingDir, spec: ScalingSpec, tell: Callable[[str], None]) -> None:
        super().__init__(group, spec, tell)
        self._refused = dict[str, str]()
        self._ended = set[str]()

    def begun(self) -> Sequence[Member]:
        """Return the sizes that have a run, except those whose end or refusal was announced."""
        over = {*self._ended, *self._refused}
        return [self._member(size) for size in self.spec.sizes if self._has_run(size) and size.name not in over]

    def next_member(self) -> Member | None:
        """Return the smallest size without a run."""
        missing = [size for size in self.spec.sizes if not self._has_run(size) and size.name not in self._refused]
        return self._member(missing[0]) if missing else None

    def refuse(self, member: Member, cause: str) -> None:
        """Remember the cause."""
        self._refused[member.name] = cause

    def follow(self, member: Member, run: RunDir, summary: Summary) -> None:  # noqa: ARG002 - all sizes end alike
        """Cancel a script that has trained for the study's minutes. The classifier ends by itself."""
        if not self.spec.script:
            return
        first, steps = next(iter(read_json_lines(run.train_metrics)), {}), History.load(run).of(FirstStep)
        began = number_in(first, "time") or (steps[0].time if steps else None)
        if began is not None and time.time() - began > 60 * self.spec.minutes:
            cancel_run(run, summary.state, final=True)

    def end(self, member: Member, run: RunDir, summary: Summary) -> None:
        """Announce the end."""
        self._ended.add(member.name)
        self.tell(f"{run.name} is {summary.state}")

    def results(self) -> Results:
        """Return the measures of all sizes."""
        measured = self._measures()
        sizes = [
            {"run": self.group.run(size.name).name, "nodes": size.nodes, "gpus_per_node": size.gpus, **vars(measures)}
            for size, measures in zip(self.spec.sizes, measured, strict=True)
        ]
        rows = [[name, *map(shown, measured)] for name, shown in _ROWS.items()]
        is_measured = any(one.speed or one.state in {"pending", "running"} for one in measured)
        return Results(
            document={"mode": self.spec.mode, "minutes": self.spec.minutes, "sizes": sizes},
            table=[["", *(one.size for one in measured)], *(row for row in rows if {*row[1:]} != {"-"})],
            sentences=[f"{one.size} is {one.state}: {one.cause}" for one in measured if one.cause],
            problem=None if is_measured else _NOT_MEASURED,
        )

    def _has_run(self, size: Size) -> bool:
        return bool(self.group.run(size.name).spec.exists())

    def _member(self, size: Size) -> Member:
        spec = self.spec
        places = {"nodes": str(size.nodes), "gpus_per_node": str(size.gpus), "ranks": str(size.ranks)}
        gpus = f"{spec.gpu_type}:{size.gpus}" if spec.gpu_type else str(size.gpus)
        flags = {"nodes": str(size.nodes), "gpus-per-node": gpus}
        growth, minutes = spec.growth(size), spec.minutes
        return Member(
            name=size.name, flags=flags,
            change=lambda program: program.of_size(places, growth=growth, minutes=minutes),
        )  # fmt: skip

    def _measures(self) -> list[Measures]:
        """Return the measures so far, by size."""
        measured = list[Measures]()
        for size in self.spec.sizes:
            run, cause = self.group.run(size.name), self._refused.get(size.name)
            if run.spec.exists():
                summary = self.cache.summary(run)
                measured.append(measure(size.name, size.ranks, run, summary, is_weak=self.spec.mode == "weak"))
            else:
                state = "refused" if cause else "waiting"
                measured.append(Measures(size=size.name, ranks=size.ranks, state=state, cause=cause))
        return with_efficiency(measured)


def split_sizes(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of `--nodes`, the values of `--gpus-per-node`, and the other arguments.

    `--nodes 1 2 4`, `--nodes=1,2,4` and `-N 1 2 4` are the same.
    """
    values: dict[str, list[str]] = {"--nodes": [], "--gpus-per-node": []}
    others, current = list[str](), None
    for word in arguments:
        name, separator, value = word.partition("=")
        name = {"-N": "--nodes"}.get(name, name.replace("_", "-"))
        if name in values:
            current = values[name]
            current += value.split(",") if separator else []
        elif current is not None and word[:1].isalnum():
            current += word.split(",")
        else:
            current = None
            others.append(word)
    return values["--nodes"], values["--gpus-per-node"], others


def read_nodes(values: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of nodes. Raises UserError if a value is not a positive whole number, or is repeated."""
    if not all(value.isdecimal() and int(value) for value in values) or len({*values}) < len(values):
        raise UserError(f"--nodes is {' '.join(values)!r}: use different numbers, such as --nodes 1 2 4 8")
    return tuple(map(int, values))


def read_gpus(values: Sequence[str]) -> tuple[str | None, tuple[int, ...]]:
    """Return the GPU type, or None, and the numbers of GPUs per node. Raises UserError if a value is not allowed."""
    split = [value.rpartition(":")[::2] for value in values]
    types = {kind for kind, _ in split if kind}
    numbers = [number for _, number in split]
    if len(types) > 1 or not all(map(str.isdecimal, numbers)) or len({*numbers}) < len(numbers):
        raise UserError(
            f"--gpus-per-node is {' '.join(values)!r}: use different numbers, such as 1 4, or a100:1 a100:4"
        )
    return next(iter(types), None), tuple(map(int, numbers))
