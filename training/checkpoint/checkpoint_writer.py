"""When the state is saved for good. Runs on every rank; rank 0 writes, or each rank its part.

The state is copied to the host's memory, for which the training hardly waits; a thread writes the copy.
"""

import math
import time
from functools import partial
from pathlib import Path

from training.checkpoint.capture import Capturer, HostCopy
from training.checkpoint.restore import SNAPSHOT
from training.checkpoint.sharded_save import save_sharded
from training.checkpoint.storage import save_checkpoint
from training.config.rules import parse_interval
from training.monitoring.run_logger import RunLogger
from training.runtime.background_writer import BackgroundWriter
from training.runtime.run_context import RunContext


class CheckpointWriter:
    """Saves the state of a run into its checkpoints."""

    def __init__(self, context: RunContext, capturer: Capturer, logger: RunLogger) -> None:
        self._directory, self._keep = context.run_dir.checkpoints, context.config.keep_checkpoints
        self._every = parse_interval("checkpoint_every", context.config.checkpoint_every)
        self._capturer, self._logger = capturer, logger
        self._state, self._loss_meter, self._group = capturer.state, capturer.loss_meter, capturer.group
        self._fault, self._console = context.fault, logger.console
        self._writes = self._group.is_rank_zero or self._state.sharded
        self._publish = partial(save_sharded, self._group.new_group()) if self._state.sharded else save_checkpoint
        self._copy, self._background = HostCopy(), BackgroundWriter()
        self._unwritten = False
        self._saved_step: int | None = 0
        self._saved_at = time.monotonic()

    def begin(self, source: str | None) -> None:
        """Count from the present step on, whose state came from there, if it was restored."""
        snapshot = source == SNAPSHOT
        # There should soon be a checkpoint of what has only been in a node's memory: what has failed may fail again.
        self._saved_step = None if snapshot else self._state.progress.step
        self._saved_at = -math.inf if snapshot else time.monotonic()

    def due_by_time(self) -> bool:
        """Whether this rank thinks that it is time for a checkpoint. Clocks differ: the ranks must agree on it."""
        return self._every.seconds is not None and time.monotonic() - self._saved_at >= self._every.seconds

    def due_by_step(self) -> bool:
        """Whether a checkpoint follows this step: at the end of an epoch, and every so many steps."""
        progress = self._state.progress
        return progress.samples_seen == 0 or bool(self._every.steps and progress.step % self._every.steps == 0)

    def save(self) -> None:
        """Begin to write a checkpoint, unless there is one of this step. All ranks must call this.

        If the writing fails, the training goes on, with the older ones as they were.

        Raises:
            DivergedError: the state must not replace a good one.
            SharedError: too many images cannot be read.
        """
        step = self._state.progress.step
        if self._saved_step == step:
            return
        self._saved_step, self._saved_at = step, time.monotonic()
        captured = self._capturer.capture()
        self._loss_meter.check(float(captured.loss), step)
        if self._writes:
            # The copy may still be being written; and what is saved knows of the best model.
            self.wait()
            began = time.monotonic()
            self._state.defer_update_until(self._copy.take(captured))
            copied = time.monotonic() - began
            # Waiting for a slow disk is a part of the training's speed.
            self._loss_meter.leave_out(copied)
            self._background.start(partial(self._write, step, copied))

    def wait(self) -> None:
        """Until the last checkpoint and the best model are on the disk, or have failed to be."""
        self._background.wait()
        self._logger.wait()

    def finish(self) -> None:
        """Wait for the last checkpoint; if it could not be written, there may be room for it by now."""
        self.wait()
        if self._unwritten and self._saved_step is not None:
            self._write(self._saved_step, 0.0)

    def _write(self, step: int, copied: float) -> None:
        self._unwritten = True
        began = time.monotonic()
        self._copy.finish()
        try:
            self._publish(self._directory, step, partial(self._fill, step), self._keep)
        except OSError as error:
            self._console.warn(f"no checkpoint of step {step} ({error}): free some space below {self._directory}")
            self._logger.event("checkpoint_failed", step=step, reason=str(error))
        else:
            seconds = round(time.monotonic() - began, 3)
            self._unwritten = False
            self._logger.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=round(copied, 4))

    def _fill(self, step: int, directory: Path) -> None:
        self._copy.write(directory, shared=self._group.is_rank_zero)
        self._fault.inject("save", step, self._group.rank)
