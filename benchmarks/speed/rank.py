"""One rank of one training loop: makes steps when `benchmarks/speed` asks for them, and reports how long they took.

Between two turns the loop waits in the middle of its own code, after a step, for a line on stdin; its ranks have no
collective in flight then. Imports torch as late as the loop itself would.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from benchmarks.speed.loops import Case

RANKS = 2
OURS, LIGHTNING, ACCELERATE = "ours", "lightning", "accelerate"
LOOPS = (OURS, "hand-written", "torchvision", "timm", LIGHTNING, ACCELERATE)


class Pacer:
    """Counts the steps of a loop, times those of a turn, and lets the loop wait until its next turn."""

    def __init__(self) -> None:
        # What libraries print goes to the log.
        self._reports = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        # The first turn is one step.
        self._left = self._timed = 1
        self._start_clock()

    def step_done(self) -> None:
        """Report at the end of a turn, and wait for the next; called after each step of the loop."""
        self._left -= 1
        if self._left == self._timed:
            self._start_clock()
        if self._left:
            return
        report = {"seconds": time.monotonic() - self._began, "page_faults": page_faults() - self._faults_before}
        self._reports.write(json.dumps(report) + "\n")
        order = sys.stdin.readline()
        if not order:
            leave()
        lead, self._timed = json.loads(order)
        self._left = lead + self._timed
        if not lead:
            self._start_clock()

    def _start_clock(self) -> None:
        self._faults_before, self._began = page_faults(), time.monotonic()


def page_faults() -> int:
    """Return how many pages the kernel has given to this process, and cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def leave() -> NoReturn:
    """End this process and its loader workers, without taking the library apart."""
    import multiprocessing  # noqa: PLC0415  # torch has imported it

    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def train_ours(case: "Case", directory: Path, step_done: Callable[[], None]) -> None:
    """Do what `python -m training` does on a rank that a node agent has started, heartbeats included.

    It saves nothing, as no other loop does: an epoch here is short, and would end with a checkpoint. Snapshots take 1 %
    of the time of a training at most, but between two turns so much time passes that one would come in each.
    """
    from benchmarks.speed import our_loop  # noqa: PLC0415
    from hpc.run.nodedir import NodeDir  # noqa: PLC0415
    from hpc.run.rundir import RunDir  # noqa: PLC0415
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
    rank, node_dir = rank_info_from(os.environ), NodeDir(directory / "node")
    launch(
        RunContext(
            # The others' augmentation.
            config=our_loop.our_config(case, rank.world_size, crop_scale="0.08,1", snapshot_every="off"),
            run_dir=RunDir(directory / "run"),
            attempt=1,
            started=time.monotonic(),
            node_dir=node_dir,
            heartbeat=Heartbeat(node_dir.heartbeat(rank.local_rank), rank.rank),
        ),
        rank,
    )


def train_rival(case: "Case", loop: str, step_done: Callable[[], None]) -> None:
    """Train with the loop of another project, for ever."""
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


def main(loop: str, directory: str, core: str, fields: str) -> None:
    """Train until stdin ends, on one core with the loader workers. `fields`: those of the case, as JSON."""
    os.sched_setaffinity(0, {int(core)})
    pacer = Pacer()
    if loop == OURS:
        from training.relay import signals  # noqa: PLC0415  # as training/__main__.py begins

        signals.install()
        gc.disable()
    from benchmarks.speed.loops import Case  # noqa: PLC0415  # imports torch, as every loop does

    values = json.loads(fields)
    case = Case(**values | {name: Path(values[name]) for name in ("folder", "packed") if values[name]})
    if loop == OURS:
        train_ours(case, Path(directory), pacer.step_done)
    else:
        train_rival(case, loop, pacer.step_done)


if __name__ == "__main__":
    main(*sys.argv[1:])
