"""Owns the block of `state`: restores the objects, and saves them while they change. Runs on every rank.

The thread that trains copies the state to the host's memory; a background thread writes the copy.
"""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from .background_writer import BackgroundWriter
from .checkpoint_files import describe_bytes, missing_snapshot_bytes, save_checkpoint, save_snapshot
from .loop_position import Batch, LoopPosition
from .object_states import STATE_FILE, Saveable, capture_states, check_restorable, serialized
from .progress_files import progress_files
from .rank_exchange import all_gather_bytes, ranks
from .restoring import restore_objects
from .stop_consensus import StepFlags, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK, check_no_later_attempt, warn

# Snapshots may take a hundredth of the time.
_SECONDS_PER_COST = 100.0


class SavedState:
    """Restores the objects of a `state` block when it begins, and saves them while it runs."""

    step: int
    """The optimizer steps done."""
    active: ClassVar["SavedState | None"] = None
    """The block that this process is in; None: it is in none."""

    def __init__(
        self, objects: dict[str, Saveable], checkpoint_seconds: float, snapshot_seconds: float, keep: int
    ) -> None:
        self.step = 0
        self._position = LoopPosition()
        self._ids = {id(each) for each in objects.values()}
        self._objects = {**objects, "epochs and batches": self._position}
        self._intervals = checkpoint_seconds, snapshot_seconds
        self._keep = keep
        self._saved_at = [time.monotonic()] * 2
        self._saved: list[tuple[int, int] | None] = [None, None]
        self._cost_seconds = 0.0
        self._background = BackgroundWriter()
        self._snapshots = THIS_RANK.snapshots if snapshot_seconds else None
        self._first_step: int | None = None
        self._unwritten: OSError | None = None

    def __enter__(self) -> Self:
        """Restore the newest state, if there is one.

        Raises:
            RuntimeError: there are several ranks, and torch.distributed is not initialized yet; or a later attempt
                has begun.
            TypeError: an object's state could be saved but not restored. Each save checks it again.
            KeyError: the state was saved from objects of other names.
        """
        if THIS_RANK.run_dir is None:
            return self
        ranks.connect("state()")
        began = time.monotonic()
        check_no_later_attempt()
        check_restorable(self._objects)
        source = restore_objects(self._objects)
        self.step = source.step if source else 0
        self._saved = [self._done if source and source.durable else None, self._done]
        self._first_step = self.step
        progress_files.beat(self.step)
        progress_files.event(
            "train_started",
            step=self.step, world_size=THIS_RANK.world_size, restored_from=source and str(source.path),
            source=source and source.source,
            restore_seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip
        SavedState.active = self
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Save the last step, also at sys.exit(0), but not after an error. Raises OSError if it cannot be written."""
        SavedState.active = None
        is_done = error is None or (isinstance(error, SystemExit) and error.code in {None, 0})
        if THIS_RANK.run_dir is not None and is_done:
            ranks.connect("state()").wait()
            self._background.wait()
            if any(all_gather_bytes(b"failed" if self._unwritten else b"", ranks.group)):
                self._saved[0] = None
            self.save(durable=True)
            self._background.wait()
            if self._unwritten:
                raise self._unwritten
            if ranks.stopping:
                name, requested_at = ranks.stopping
                seconds = round(time.monotonic() - requested_at, 3)
                progress_files.event("train_stopped", step=self.step, signal=name, seconds=seconds)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the saved one to the last of `count`, from 0. Ends the script if it has to stop.

        The body of the loop runs for each epoch. It runs again for an epoch that was interrupted, where `batches` then
        yields what is left of it, perhaps nothing. A loop that is left by `break` is over in later starts, too.
        """
        while self._position.epoch < count:
            _exit_if_asked()  # the end of the epoch before is a part of the state now
            self._position.begin_epoch()
            try:
                yield self._position.epoch
            except GeneratorExit:
                # A loop that was left by `break` is over: the next start does not continue it.
                if not ranks.stopping:
                    self._position.epoch = count
                raise
            self._position.end_epoch()
        _exit_if_asked()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of an epoch from the saved one, and count `step`. Ends the script if it has to stop.

        Batches before the saved one are loaded and left out, unless the loader is one of the saved objects.
        """
        skips = id(loader) not in self._ids
        for batch in self._position.batches(loader, skips=skips, skipped=lambda: progress_files.beat(self.step)):
            self.step += 1
            yield batch
            _exit_if_asked()

    def due(self) -> tuple[int, int]:
        """Return whether a checkpoint is due, and whether a snapshot is, as 1 or 0; always 0 on ranks other than 0.

        Also records the event of the first step, once that is done.
        """
        if self._first_step is not None and self.step > self._first_step:
            progress_files.event("first_step", step=self.step)
            self._first_step = None
        if THIS_RANK.rank != 0 or self._background.busy:
            return 0, 0
        checkpoint_seconds, snapshot_seconds = self._intervals
        waits = checkpoint_seconds, max(snapshot_seconds, _SECONDS_PER_COST * self._cost_seconds)
        late = [time.monotonic() - at >= wait for at, wait in zip(self._saved_at, waits, strict=True)]
        return int(late[0]), int(late[1] and self._snapshots is not None)

    @property
    def _done(self) -> tuple[int, int]:
        """What the state has: the steps, and the epochs with all that follows their last step."""
        return self.step, self._position.epoch

    def save(self, *, durable: bool) -> None:
        """Save what is done, unless it is saved already. All ranks call it together.

        A failed write raises nothing here: a checkpoint is tried again when the next one is due, and at the end.
        """
        kind, began = 0 if durable else 1, time.monotonic()
        self._saved_at[kind] = began
        if self._saved[kind] == self._done:
            return
        self._saved[kind] = self._done
        content = capture_states(self._objects, self.step)
        copy_seconds = time.monotonic() - began
        self._cost_seconds = max(0.9 * self._cost_seconds, copy_seconds)
        directory = THIS_RANK.checkpoints if durable else self._snapshots
        if directory and (durable or not self._background.busy):
            write = partial(self._write, directory, self.step, content, copy_seconds, durable=durable)
            self._background.submit(write)

    def _write(
        self, directory: Path, step: int, content: Mapping[str, Any], copy_seconds: float, *, durable: bool
    ) -> None:
        began, thread_began = time.monotonic(), time.thread_time()
        try:
            _write_state(directory, step, serialized(content), keep=self._keep if durable else None)
        except OSError as error:
            if durable:
                self._unwritten = error
                progress_files.event("checkpoint_failed", step=step, reason=str(error))
                warn(f"the checkpoint of step {step} could not be written, and is tried again later: {error}")
            else:
                self._snapshots = None
                warn(f"no more snapshots: {error}; an interruption now costs the steps since the last checkpoint")
            return
        if durable:
            self._unwritten, seconds = None, round(time.monotonic() - began, 3)
            progress_files.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=round(copy_seconds, 4))
        else:
            # Where the ranks compute on CPUs, this thread takes time from them.
            self._cost_seconds = max(self._cost_seconds, time.thread_time() - thread_began)


def should_stop() -> bool:
    """Return whether to save and exit with 0: True on all ranks at the same call, one step after a rank got a signal.

    All ranks call it equally often, after each step; `saved.batches(...)` calls it for you. In `with state(...)`, it
    also takes the snapshots that are due.

    Raises:
        RuntimeError: there are several ranks, and torch.distributed is not initialized yet.
    """
    if THIS_RANK.run_dir is None or ranks.stopping:
        return ranks.stopping is not None
    consensus, saved = ranks.connect("should_stop()"), SavedState.active
    progress_files.beat(saved.step if saved else None)
    checkpoint, snapshot = saved.due() if saved else (0, 0)
    try:
        agreed = consensus.exchange(StepFlags(signal=signals.received(), save=checkpoint, snapshot=snapshot))
    except StopRequested as request:
        ranks.stopping = request.name, signals.received_at() or time.monotonic()
        return True
    if saved and (agreed.save or agreed.snapshot):
        saved.save(durable=bool(agreed.save))
    return False


def _exit_if_asked() -> None:
    if should_stop():
        sys.exit(0)


def _write_state(directory: Path, step: int, data: bytes, *, keep: int | None) -> None:
    """Write a checkpoint or, if `keep` is None, a snapshot. Raises OSError."""

    def write_file(temporary: Path) -> dict[str, Any]:
        (temporary / STATE_FILE).write_bytes(data)
        return {STATE_FILE: describe_bytes(data)}

    if keep is not None:
        save_checkpoint(directory, step, write_file, keep, 0o700, check=check_no_later_attempt)
        return
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory).free < missing_snapshot_bytes(directory, len(data)):
        raise OSError(f"{directory} has no space for 3 snapshots of {len(data) / 1e6:,.1f} MB")
    save_snapshot(directory, step, write_file)
