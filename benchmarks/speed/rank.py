"""One rank of one training loop: makes steps when `benchmarks/speed` asks for them, and reports how long they took.

Between two turns the loop waits in the middle of its own code, after a step, for a line on stdin; its ranks have no
collective in flight then. Imports nothing heavy by itself: each loop is charged for its own imports.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from benchmarks.speed.loops import Case

RANKS = 2
OURS, LIGHTNING, ACCELERATE = "ours", "lightning", "accelerate"
LOOPS = (OURS, "hand-written", "torchvision", "timm", LIGHTNING, ACCELERATE)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank does, as it stands in its argument."""

    loop: str
    case: dict[str, Any]
    """The fields of `loops.Case`, with paths as text."""
    directory: str
    """For the files of ours."""
    spawned: float
    """time.monotonic() at the start of the process."""
    core: int
    """Where the rank and its loader workers run."""


class Pacer:
    """Counts the steps of a loop, times those of a turn, and lets the loop wait until its next turn."""

    def __init__(self, spawned: float) -> None:
        # What libraries print goes to the log.
        self._reports = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began, self._waited_before, self._cpu_before, self._faults_before = spawned, 0.0, 0.0, 0
        self._left = self._timed = 1
        self.waited = 0.0
        """Seconds in the loader."""

    def step_done(self) -> None:
        """After each step of the loop: report at the end of a turn, and wait for the next."""
        self._left -= 1
        if self._left == self._timed:
            self._start_clock()
        if self._left:
            return
        seconds = time.monotonic() - self._began
        cpu = cpu_seconds() - self._cpu_before
        faults = page_faults() - self._faults_before
        self.report(seconds=seconds, cpu=cpu, waited=self.waited - self._waited_before, page_faults=faults)
        order = sys.stdin.readline()
        if not order:
            leave()
        lead, steps = json.loads(order)
        self._left, self._timed = lead + steps, steps
        if not lead:
            self._start_clock()

    def report(self, **values: Any) -> None:
        """One line to the benchmark."""
        self._reports.write(json.dumps(values) + "\n")

    def _start_clock(self) -> None:
        self._cpu_before, self._waited_before, self._faults_before = cpu_seconds(), self.waited, page_faults()
        self._began = time.monotonic()


def cpu_seconds() -> float:
    """Of this process, and of the children that it has, its loader workers."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            # The second field, a name in parentheses, may hold spaces; the 14th and 15th are times.
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def page_faults() -> int:
    """Pages that the kernel has given to this process, and cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def leave() -> NoReturn:
    """End this process and its loader workers, without taking the library apart."""
    import multiprocessing  # noqa: PLC0415  # torch has imported it

    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def time_loading(pacer: Pacer) -> None:
    """Let torch's loaders, on which all loops are built, count the time in which a loop waits for a batch."""
    from torch.utils.data import dataloader  # noqa: PLC0415  # see the module

    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001  # there is no public way
    make_next = iterator.__next__

    def timed(batches: Any) -> Any:
        began = time.monotonic()
        try:
            return make_next(batches)
        finally:
            pacer.waited += time.monotonic() - began

    iterator.__next__ = timed


def train_ours(case: "Case", work: Work, step_done: Callable[[], None]) -> None:
    """What `python -m training` does on a rank that a node agent has started, heartbeats included.

    It saves nothing, as no other loop does: an epoch here is short, and would end with a checkpoint. Snapshots take 1 %
    of the time of a training at most (`benchmarks/snapshots.py`), but between two turns so much time passes that one
    would come in each: with ResNet-18 they took 16 % of such turns.
    """
    from benchmarks.speed import our_loop  # noqa: PLC0415
    from hpc.core.nodedir import NodeDir  # noqa: PLC0415
    from hpc.core.rundir import RunDir  # noqa: PLC0415
    from training.engine.launch import launch  # noqa: PLC0415
    from training.engine.trainer import Trainer  # noqa: PLC0415
    from training.relay import Heartbeat  # noqa: PLC0415
    from training.runtime.run_context import RunContext, rank_info_from  # noqa: PLC0415

    make_steps = Trainer.steps

    def steps(trainer: Trainer) -> Any:
        for _ in make_steps(trainer):
            step_done()
            yield

    def save_nothing(_trainer: Trainer) -> None:
        pass

    Trainer.steps, Trainer.save = steps, save_nothing  # type: ignore[assignment,method-assign]
    rank, directory = rank_info_from(os.environ), Path(work.directory)
    node_dir = NodeDir(directory / "node")
    launch(
        RunContext(
            # The others' augmentation.
            config=our_loop.our_config(case, rank.world_size, crop_scale="0.08,1", snapshot_every="off"),
            run_dir=RunDir(directory / "run"),
            attempt=1,
            started=work.spawned,
            node_dir=node_dir,
            heartbeat=Heartbeat(node_dir.heartbeat(rank.local_rank), rank.rank),
        ),
        rank,
    )


def train_rival(case: "Case", loop: str, step_done: Callable[[], None]) -> None:
    """The loop of another project, for ever."""
    from torch import device, distributed  # noqa: PLC0415

    if loop == LIGHTNING:
        from benchmarks.speed.library_loops import fit_with_lightning  # noqa: PLC0415

        fit_with_lightning(case, RANKS, step_done)
        return
    if loop == ACCELERATE:
        from benchmarks.speed.library_loops import accelerate_style  # noqa: PLC0415

        steps = accelerate_style(case, device("cpu"))
    else:
        from benchmarks.speed.loops import RIVALS  # noqa: PLC0415

        distributed.init_process_group("gloo")
        steps = RIVALS[loop](case, device("cpu"))
    for _ in steps:
        step_done()


def main() -> None:
    """Train until stdin ends."""
    work = Work(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, {work.core})
    pacer = Pacer(work.spawned)
    if work.loop == OURS:
        from training.relay import signals  # noqa: PLC0415  # as training/__main__.py begins

        signals.install()
        gc.disable()
    from benchmarks.speed.loops import Case  # noqa: PLC0415  # imports torch, as every loop does

    paths = {name: Path(work.case[name]) for name in ("folder", "packed") if work.case[name]}
    case = Case(**work.case | paths)
    time_loading(pacer)
    if work.loop == OURS:
        train_ours(case, work, pacer.step_done)
    else:
        train_rival(case, work.loop, pacer.step_done)


if __name__ == "__main__":
    main()
