"""When the state is saved, and how all ranks come by it again. Runs on every rank; rank 0 writes and reads.

The training waits while the state is copied to the host's memory; a thread writes the copy.
"""

import time
from functools import partial
from pathlib import Path

from training.background import Background
from training.checkpoint import newest_checkpoint, save_checkpoint
from training.config import parse_checkpoint_every
from training.distributed import Ranks
from training.job import Job
from training.recorder import Recorder
from training.state import STATE_FILES, HostCopy, TrainState, check_files
from training.window import Window


class Saver:
    """Saves the state of a run into its checkpoints, and restores the newest intact one."""

    def __init__(self, job: Job, state: TrainState, window: Window, ranks: Ranks, recorder: Recorder) -> None:
        self._directory, self._keep = job.run_dir.checkpoints, job.config.keep_checkpoints
        self._every = parse_checkpoint_every(job.config.checkpoint_every)
        self._state, self._window, self._ranks, self._recorder = state, window, ranks, recorder
        self._fault, self._console = job.fault, recorder.console
        self._copy, self._background = HostCopy(), Background()
        self._unwritten = False
        self._saved_step = 0
        self._saved_at = time.monotonic()

    def restore(self) -> str:
        """Take the newest intact checkpoint, if there is one, and return its name.

        Rank 0 reads it for all, so the others need not see the same storage.

        Raises:
            SharedError: it belongs to a run with other data or settings, or to another version of the trainer.
        """
        with self._ranks.together():
            found = newest_checkpoint(self._directory, self._reject) if self._ranks.leads else None
            if found:
                check_files(found.files, str(found.path))
        name = self._ranks.broadcast_bytes(found.path.name.encode() if found else b"").decode()
        if name:
            files = {file: self._ranks.broadcast_bytes(found.files[file] if found else None) for file in STATE_FILES}
            with self._ranks.together():
                self._state.restore(files, name)
        progress = self._state.progress
        self._saved_step = progress.step
        self._saved_at = time.monotonic()
        self._window.restart(progress.window_loss if self._ranks.leads else 0.0, progress.window_images)
        return name

    def _reject(self, path: Path, reason: str) -> None:
        self._console.warn(f"checkpoint {path} is not used: {reason}")
        self._recorder.event("checkpoint_rejected", path=str(path), reason=reason)

    def due_by_time(self) -> bool:
        """Whether this rank thinks that it is time for a checkpoint. Clocks differ: the ranks must agree on it."""
        return self._every.seconds is not None and time.monotonic() - self._saved_at >= self._every.seconds

    def due_by_step(self) -> bool:
        """Whether a checkpoint follows this step: at the end of an epoch, and every so many steps."""
        progress = self._state.progress
        return progress.samples_seen == 0 or bool(self._every.steps and progress.step % self._every.steps == 0)

    def save(self) -> None:
        """Begin to write a checkpoint, unless there is one of this step.

        If the writing fails, the training goes on, with the older ones as they were.

        Raises:
            SharedError: the training has diverged; its state must not replace a good one.
        """
        progress = self._state.progress
        if self._saved_step == progress.step:
            return
        self._saved_at = time.monotonic()
        progress.window_loss = self._window.total_loss(progress.step)
        progress.window_images = self._window.images
        self._saved_step = progress.step
        if self._ranks.leads:
            # The copy may still be being written; and what is saved knows of the best model.
            self.wait()
            began = time.monotonic()
            self._copy.take(self._state)
            copied = time.monotonic() - began
            # Waiting for a slow disk is a part of the training's speed.
            self._window.leave_out(copied)
            self._background.start(partial(self._write, progress.step, copied))

    def wait(self) -> None:
        """Until the last checkpoint and the best model are on the disk, or have failed to be."""
        self._background.wait()
        self._recorder.wait()

    def finish(self) -> None:
        """Wait for the last checkpoint; if it could not be written, there may be room for it by now."""
        self.wait()
        if self._unwritten:
            self._write(self._saved_step, 0.0)

    def _write(self, step: int, copied: float) -> None:
        self._unwritten = True
        began = time.monotonic()
        try:
            save_checkpoint(self._directory, step, partial(self._fill, step), self._keep)
        except OSError as error:
            self._console.warn(f"no checkpoint of step {step} ({error}): free some space below {self._directory}")
            self._recorder.event("checkpoint_failed", step=step, reason=str(error))
        else:
            seconds = round(time.monotonic() - began, 3)
            self._unwritten = False
            self._recorder.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=round(copied, 4))

    def _fill(self, step: int, directory: Path) -> None:
        self._copy.write(directory)
        self._fault.strike("save", step, self._ranks.rank)
