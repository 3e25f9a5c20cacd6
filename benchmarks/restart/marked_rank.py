"""A rank of our trainer with marks: `-m benchmarks.restart.marked_rank training ...` in place of `-m training ...`."""

import gc
import runpy
import sys

from benchmarks.restart.marks import mark, mark_after


def add_marks() -> None:
    """Import the trainer, and mark what it does until its first step."""
    from training.checkpoint.restore import Restorer  # noqa: PLC0415  # takes seconds, between two marks
    from training.engine import launch  # noqa: PLC0415
    from training.engine.step import Stepper  # noqa: PLC0415
    from training.engine.step_timer import StepTimer  # noqa: PLC0415
    from training.engine.trainer import Trainer  # noqa: PLC0415

    mark("imported")
    mark_after(launch, "connect", "connected")
    mark_after(launch, "run_preflight", "checked")
    mark_after(launch, "load_data", "data")
    mark_after(launch, "build_model", "model")
    mark_after(Trainer, "__init__", "trainer")
    mark_after(Stepper, "warm_up", "warm")
    mark_after(Restorer, "restore", "restored")
    mark_after(StepTimer, "step_done", "stepped", once=True)


if __name__ == "__main__":
    mark("program")
    # As the trainer does while it imports.
    gc.disable()
    add_marks()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
