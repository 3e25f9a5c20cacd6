"""A rank of our trainer with marks: `-m benchmarks.restart.marked_rank training ...` in place of `-m training ...`."""

import gc
import runpy
import sys

from benchmarks.restart.marks import mark, mark_first

if __name__ == "__main__":
    mark("program")
    # As the trainer does while it imports.
    gc.disable()
    import training.engine.launch  # noqa: F401  # its imports are measured
    from training.engine.step_timer import StepTimer

    mark("imported")
    mark_first(StepTimer, "step_done", "stepped")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
