"""A rank of our trainer with a step log: `-m benchmarks.restart.marked_rank LOG ARGS...` for `-m training ARGS...`."""

import time

if __name__ == "__main__":
    BEGAN = time.time()

import gc
import itertools
import os
import runpy
import sys
from pathlib import Path

from benchmarks.recovery.rivals.step_log import StepLog

if __name__ == "__main__":
    # As the trainer does while it imports.
    gc.disable()
    import training.engine.launch  # noqa: F401  # its imports are measured
    from training.engine.step_timer import StepTimer

    log = StepLog(Path(sys.argv[1]), int(os.environ["RANK"]), 0, began=BEGAN, imported=time.time())
    original, numbers = StepTimer.step_done, itertools.count(1)

    def step_done(timer: StepTimer) -> None:
        """Log that the step is over."""
        original(timer)
        log.step(next(numbers))

    StepTimer.step_done = step_done  # type: ignore[assignment,method-assign]
    sys.argv = ["training", *sys.argv[2:]]
    runpy.run_module("training", run_name="__main__", alter_sys=True)
