"""Owns the `with state(...)` block: restores the objects, and saves them while they change. Runs on every rank.

The thread that trains copies the state to host memory; a background thread writes the copy.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from .background_writer import BackgroundWriter
from .checkpoint_files import (
    describe_bytes,
    make_private,
    missing_snapshot_bytes,
    new_unpublished,
    remove_published,
    save_checkpoint,
    save_snapshot,
    unpublish,
)
from .loop_position import Batch, LoopPosition
from .object_states import (
    STATE_FILE,
    CopyMemory,
    Saveable,
    capture_states,
    check_restorable,
    serialize,
    serialized,
    uses_gpu,
)
from .progress_files import progress_files
from .rank_exchange import all_gather_bytes, ranks
from .restoring import restore_objects
from .stop_consensus import StepFlags, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK, check_no_later_attempt, warn

# Snapshots may take 1 % of the time.
_SECONDS_PER_COST = 100.0


class SavedState:
    """Restores the objects of a `with state(...)` block when it begins, and saves them while it runs."""

    step: int
    """The number of optimizer steps done."""
    active: ClassVar["SavedState | None"] = None
    """The `with state(...)` block that this process is in, or None."""

    def __init__(
        self, objects: dict[str, Saveable], checkpoint_seconds: float, snapshot_seconds: float, keep: int
    ) -> None:
        self.step = 0
        self._position = LoopPosition(objects)
        self._asked = 0, 0
        """What the ranks have agreed to save as soon as they can: for a checkpoint and a snapshot, 1 or 0."""
        self._stops = False
        self._objects = {**objects, "epochs and batches": self._position}
        self._intervals = checkpoint_seconds, snapshot_seconds
        self._keep = keep
        self._saved_at = [time.monotonic()] * 2
        self._saved: list[tuple[int, int] | None] = [None, None]
        self._cost_seconds = 0.0
        self._background = BackgroundWriter()
        self._snapshots = Snapshots(THIS_RANK.snapshots) if THIS_RANK.snapshots and snapshot_seconds else None
        self._memory = CopyMemory()
        self._unwritten: OSError | None = None

    def __enter__(self) -> Self:
        """Restore the newest state, if one exists.

        Raises:
            RuntimeError: torch.distributed is not initialized but the run has several ranks; or a later attempt has
                begun.
            TypeError: an object's state could be saved but not restored. Each save checks this again.
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
        progress_files.begin(self.step)
        progress_files.event(
            "train_started",
            step=self.step, world_size=THIS_RANK.world_size, restored_from=source and str(source.path),
            source=source and source.source,
            restore_seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip
        SavedState.active = self
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Save the last step if the block ended without error or by sys.exit(0). Raises OSError if the write fails."""
        SavedState.active = None
        is_done = error is None or (isinstance(error, SystemExit) and error.code in {None, 0})
        if THIS_RANK.run_dir is not None and is_done:
            ranks.connect("state()").wait()
            self._background.wait()
            if any(all_gather_bytes(b"failed" if self._unwritten else b"", ranks.group)):
                self._saved[0] = None
            self.save(durable=True)
            self._background.wait()
            self._memory = CopyMemory()
            if self._unwritten:
                raise self._unwritten
            if ranks.stopping:
                name, requested_at = ranks.stopping
                seconds = round(time.monotonic() - requested_at, 3)
                progress_files.event("train_stopped", step=self.step, signal=name, seconds=seconds)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the saved one (at first 0) to `count` - 1. Calls sys.exit(0) if the script has to stop.

        An interrupted epoch is yielded again, and `batches` then yields its remaining batches, perhaps none. A loop
        that the script left by `break` does not continue in later attempts.
        """
        while self._position.epoch < count:
            _exit_if_asked()  # a state saved here includes the end of the previous epoch
            self._position.begin_epoch()
            try:
                yield self._position.epoch
            except GeneratorExit:
                # The script left the loop by `break`, so the next attempt must not continue it.
                if not self._stops:
                    self._position.epoch = count
                self._position.end_epochs()
                raise
            self._position.end_epoch()
        self._position.end_epochs()
        _exit_if_asked()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield an epoch's remaining batches, and count them in `step`. Calls sys.exit(0) if the script has to stop.

        The batches that were used before the save are loaded and skipped, unless the loader is a saved object. While
        gradients are accumulated, nothing is saved, and the script does not stop before the optimizer has stepped.

        Raises:
            ValueError: a saved object, such as a sampler, is a part of the loader.
        """
        for batch in self._position.batches(loader, skipped=lambda: progress_files.beat(self.step)):
            self.step += 1
            yield batch
            _exit_if_asked()

    def due(self) -> tuple[int, int]:
        """Return two numbers, for a checkpoint and a snapshot: 1 if it is due, else 0. Only rank 0 returns ones."""
        if THIS_RANK.rank != 0 or self._background.busy or any(self._asked):
            return 0, 0
        checkpoint_seconds, snapshot_seconds = self._intervals
        waits = checkpoint_seconds, max(snapshot_seconds, _SECONDS_PER_COST * self._cost_seconds)
        late = [time.monotonic() - at >= wait for at, wait in zip(self._saved_at, waits, strict=True)]
        return int(late[0]), int(late[1] and self._snapshots is not None)

    @property
    def _done(self) -> tuple[int, int]:
        """The steps done, and the epochs done. An epoch is done when the script's loop asks for the next one."""
        return self.step, self._position.epoch

    def stops(self) -> bool:
        """Return whether the script may stop now. After a rank got a signal, all ranks call this, until it is True."""
        self._stops = self._stops or self._is_complete()
        return self._stops

    def save_agreed(self, checkpoint: int, snapshot: int) -> None:
        """Save what the ranks have agreed on, now or at a later call. All ranks call this with the same numbers."""
        self._asked = max(self._asked[0], checkpoint), max(self._asked[1], snapshot)
        if any(self._asked) and self._is_complete():
            durable, self._asked = bool(self._asked[0]), (0, 0)
            self.save(durable=durable)

    def _is_complete(self) -> bool:
        """Return whether a state saved now is complete on every rank. All ranks must call this."""
        return not any(all_gather_bytes(b"open" if self._position.is_open else b"", ranks.group))

    def save(self, *, durable: bool) -> None:
        """Save a checkpoint (`durable`) or snapshot, unless the last one has this step and epoch. All ranks call this.

        A failed write raises no error here: another checkpoint is written when the next one is due, and at the end.
        """
        kind, began = 0 if durable else 1, time.monotonic()
        self._saved_at[kind] = began
        if self._saved[kind] == self._done:
            return
        self._saved[kind] = self._done
        thread_began = time.thread_time()
        # While the last copy is being written, it must not change. Without snapshots, copies are too rare for memory of
        # their own.
        is_kept = self._snapshots and not self._background.busy
        memory = self._memory if is_kept else CopyMemory()
        content = capture_states(self._objects, self.step, memory)
        copy_seconds = time.monotonic() - began
        # Ranks that compute on CPUs share them. So count CPU time, not waits for a CPU or another rank.
        cost = copy_seconds if uses_gpu() else time.thread_time() - thread_began
        self._cost_seconds = max(0.9 * self._cost_seconds, cost)
        if durable and THIS_RANK.checkpoints:
            write = partial(self._write_checkpoint, THIS_RANK.checkpoints, self.step, content, copy_seconds)
            self._background.submit(write)
        elif not durable and not self._background.busy and self._snapshots:  # in this order: a failed write ends them
            size_bytes = memory.size_bytes + sum(map(len, content["own"]))
            write = partial(self._snapshots.save, self.step, content, size_bytes)
            self._background.submit(partial(self._write_snapshot, write, cost))

    def _write_checkpoint(self, directory: Path, step: int, content: Mapping[str, Any], copy_seconds: float) -> None:
        began = time.monotonic()
        try:
            data = serialized(content)

            def write_file(temporary: Path) -> dict[str, Any]:
                (temporary / STATE_FILE).write_bytes(data)
                return {STATE_FILE: describe_bytes(data)}

            save_checkpoint(directory, step, write_file, self._keep, 0o700, check=check_no_later_attempt)
        except OSError as error:
            self._unwritten = error
            progress_files.event("checkpoint_failed", step=step, reason=str(error))
            warn(f"the checkpoint of step {step} could not be written, and is tried again later: {error}")
            return
        self._unwritten, seconds = None, round(time.monotonic() - began, 3)
        progress_files.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=round(copy_seconds, 4))

    def _write_snapshot(self, write: Callable[[], None], copy_cost: float) -> None:
        thread_began = time.thread_time()
        try:
            write()
        except OSError as error:
            self._snapshots, self._memory = None, CopyMemory()
            warn(f"no more snapshots: {error}; an interruption now costs the steps since the last checkpoint")
            return
        # Ranks that compute on CPUs share them with this thread, too.
        cost = time.thread_time() - thread_began + (0.0 if uses_gpu() else copy_cost)
        self._cost_seconds = max(self._cost_seconds, cost)


class Snapshots:
    """Writes a script's snapshots to a node's memory, over outdated ones: new memory would take twice as long."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._outdated: Path | None = None

    def save(self, step: int, content: Mapping[str, Any], size_bytes: int) -> None:
        """Write a snapshot, and keep the newest two. Raises OSError if it cannot be written.

        `size_bytes` is the approximate size of the content.
        """
        make_private(self._directory)
        outdated, self._outdated = self._outdated, None
        if outdated and not (outdated / STATE_FILE).exists():  # somebody has removed it
            shutil.rmtree(outdated, ignore_errors=True)
            outdated = None
        if outdated is None:
            if shutil.disk_usage(self._directory).free < missing_snapshot_bytes(self._directory, size_bytes):
                raise OSError(f"{self._directory} has no space for 3 snapshots of {size_bytes / 1e6:,.1f} MB")
            outdated = new_unpublished(self._directory)
            outdated.mkdir(mode=0o700)

        def write_file(temporary: Path) -> None:
            path = temporary / STATE_FILE
            path.touch()
            with path.open("r+b") as file:
                serialize(content, file)
                file.truncate()

        try:
            save_snapshot(self._directory, step, write_file, reused=outdated, remove=self._keep_one)
        except BaseException:
            shutil.rmtree(outdated, ignore_errors=True)
            raise

    def _keep_one(self, outdated: Path) -> None:
        """Keep an outdated snapshot for the next one, and remove any others."""
        if self._outdated:
            remove_published(outdated)
            return
        with suppress(OSError):  # somebody has removed it
            self._outdated = unpublish(outdated)


def should_stop() -> bool:
    """Return whether to save and to exit with code 0. After a rank got a signal, all ranks get True at the same step.

    All ranks call this after each step; `saved.batches(...)` does so for you. Within `with state(...)`, it also saves
    the snapshots and checkpoints that are due.

    Raises:
        RuntimeError: torch.distributed is not initialized but the run has several ranks.
    """
    if THIS_RANK.run_dir is None:
        return False
    saved = SavedState.active
    if ranks.stopping is None:
        consensus = ranks.connect("should_stop()")
        progress_files.beat(saved.step if saved else None)
        checkpoint, snapshot = saved.due() if saved else (0, 0)
        try:
            agreed = consensus.exchange(StepFlags(signal=signals.received(), save=checkpoint, snapshot=snapshot))
        except StopRequested as request:
            ranks.stopping = request.name, signals.received_at() or time.monotonic()
        else:
            if saved:
                saved.save_agreed(agreed.save, agreed.snapshot)
            return False
    return saved is None or saved.stops()


def _exit_if_asked() -> None:
    if should_stop():
        sys.exit(0)
