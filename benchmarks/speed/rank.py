"""One rank of one training loop, for `benchmarks/speed`: trains until it is killed; rank 0 reports how long steps take.

Imports torch as late as the loop itself would.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.speed.loops import Case

RANKS = 2
OURS, LIGHTNING, ACCELERATE = "ours", "lightning", "accelerate"
LOOPS = (OURS, "hand-written", "torchvision", "timm", LIGHTNING, ACCELERATE)
# The first steps allocate memory, and train on batches that the loader worker had time to make.
_WARM_UP_STEPS, _FEWEST_STEPS = 8, 2


class Stopwatch:
    """Times the steps of a loop for some seconds, and reports once."""

    def __init__(self, seconds: float) -> None:
        # What libraries print goes to the log.
        self._report = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._seconds, self._steps, self._began, self._page_faults = seconds, -_WARM_UP_STEPS, 0.0, 0

    def step_done(self) -> None:
        """Count a step; the loop calls this after each."""
        self._steps += 1
        if self._steps == 0:
            self._page_faults, self._began = page_faults(), time.monotonic()
        took = time.monotonic() - self._began
        if self._steps < _FEWEST_STEPS or took < self._seconds or self._report.closed:
            return
        faults = page_faults() - self._page_faults
        report = {"seconds_per_step": took / self._steps, "page_faults": faults / self._steps}
        with self._report:
            self._report.write(f"{json.dumps(report)}\n")


def page_faults() -> int:
    """Return how many pages the kernel has given to this process, and cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def train_ours(case: "Case", directory: Path, step_done: Callable[[], None]) -> None:
    """Do what `python -m training` does on a rank that a node agent has started, heartbeats included.

    It saves nothing, as no other loop does: an epoch here is short, and would end with a checkpoint.
    """
    from torchrelay.progress_files import Heartbeat  # noqa: PLC0415

    from benchmarks.speed import our_loop  # noqa: PLC0415
    from hpc.run.nodedir import NodeDir  # noqa: PLC0415
    from hpc.run.rundir import RunDir  # noqa: PLC0415
    from training.engine.launch import launch  # noqa: PLC0415
    from training.engine.trainer import Trainer  # noqa: PLC0415
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
    """Train with the loop of another project."""
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


def main(loop: str, directory: str, seconds: str, fields: str) -> None:
    """Train on one core with the loader worker. `fields`: those of the case, as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    stopwatch = Stopwatch(float(seconds))
    if loop == OURS:
        from torchrelay.stop_signals import signals  # noqa: PLC0415  # as training/__main__.py begins

        signals.install()
        gc.disable()
    from benchmarks.speed.loops import Case  # noqa: PLC0415  # imports torch, as every loop does

    case = Case(**json.loads(fields))
    if loop == OURS:
        train_ours(case, Path(directory), stopwatch.step_done)
    else:
        train_rival(case, loop, stopwatch.step_done)


if __name__ == "__main__":
    main(*sys.argv[1:])
