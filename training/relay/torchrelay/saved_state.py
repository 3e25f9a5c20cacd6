"""Owns the `with state(...)` block: restores the objects, and saves them while they change. Runs on every rank."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar, Self

from .loop_position import Batch, LoopPosition
from .progress_files import progress_files
from .rank_exchange import all_gather_json, ranks
from .saving.objects import Saveable, capture, check_restorable
from .saving.restoring import Restorer
from .saving.state_writer import StateWriter
from .stop_consensus import StepFlags, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK, check_no_later_attempt, warn

# Snapshots may take 1 % of the time.
_SECONDS_PER_COST = 100.0


class _Reports:
    """Records what the background thread has done."""

    def __init__(self) -> None:
        self._warned = set[str]()

    def checkpoint_saved(self, step: int, seconds: float, copy_seconds: float) -> None:
        progress_files.event("checkpoint_saved", step=step, seconds=round(seconds, 3), copy_seconds=round(copy_seconds, 4))

    def checkpoint_failed(self, step: int, reason: str) -> None:
        progress_files.event("checkpoint_failed", step=step, reason=reason)
        warn(f"the checkpoint of step {step} could not be written, and is tried again later: {reason}")

    def snapshots_off(self, reason: str) -> None:
        self._warn_once(f"no snapshots: {reason}; an interruption now costs the steps since the last checkpoint")

    def copies_off(self, reason: str) -> None:
        self._warn_once(f"nodes keep no copies of other nodes' shards: {reason}; a lost node now costs the steps since "
                        "the last checkpoint")

    def _warn_once(self, text: str) -> None:
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)


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
        self._position = LoopPosition()
        self._ids = {id(each) for each in objects.values()}
        self._objects = {**objects, "epochs and batches": self._position}
        self._intervals = checkpoint_seconds, snapshot_seconds
        self._saved_at = [time.monotonic()] * 2
        self._saved: list[tuple[int, int] | None] = [None, None]
        self._writer = StateWriter(
            checkpoints=THIS_RANK.checkpoints,
            snapshots=THIS_RANK.snapshots if snapshot_seconds else None,
            keep=keep,
            reports=_Reports(),
        )

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
        self._writer.connect()
        restorer = Restorer(checkpoints=THIS_RANK.checkpoints, snapshots=THIS_RANK.snapshots, objects=self._objects)
        source = restorer.restore()
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
            self._writer.wait()
            if any(all_gather_json(self._writer.failed_step is not None)):
                self._saved[0] = None
            self.save(durable=True)
            self._writer.wait()
            if self._writer.failed_step is not None:
                raise OSError(f"the checkpoint of step {self._writer.failed_step} could not be written")
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
                if not ranks.stopping:
                    self._position.epoch = count
                raise
            self._position.end_epoch()
        _exit_if_asked()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield an epoch's remaining batches, and count them in `step`. Calls sys.exit(0) if the script has to stop.

        The batches that were used before the save are loaded and skipped, unless the loader is a saved object.
        """
        skips = id(loader) not in self._ids
        for batch in self._position.batches(loader, skips=skips, skipped=lambda: progress_files.beat(self.step)):
            self.step += 1
            yield batch
            _exit_if_asked()

    def due(self) -> tuple[int, int]:
        """Return two numbers, for a checkpoint and a snapshot: 1 if it is due, else 0. Only rank 0 returns ones."""
        if THIS_RANK.rank != 0 or self._writer.busy:
            return 0, 0
        checkpoint_seconds, snapshot_seconds = self._intervals
        waits = checkpoint_seconds, max(snapshot_seconds, _SECONDS_PER_COST * self._writer.snapshot_cost_seconds)
        late = [time.monotonic() - at >= wait for at, wait in zip(self._saved_at, waits, strict=True)]
        return int(late[0]), int(late[1] and self._writer.snapshots is not None)

    @property
    def _done(self) -> tuple[int, int]:
        """The steps done, and the epochs done. An epoch is done when the script's loop asks for the next one."""
        return self.step, self._position.epoch

    def save(self, *, durable: bool) -> None:
        """Save a checkpoint (`durable`) or snapshot, unless the last one has this step and epoch. All ranks call this.

        A failed write raises no error here: another checkpoint is written when the next one is due, and at the end.
        """
        kinds = (0, 1) if durable else (1,)  # a checkpoint is a snapshot, too
        began, cpu_began = time.monotonic(), time.thread_time()
        for kind in kinds:
            self._saved_at[kind] = began
        if self._saved[kinds[0]] == self._done:
            return
        for kind in kinds:
            self._saved[kind] = self._done
        self._writer.save(capture(self._objects, self.step), {}, began, cpu_began, durable=durable)


def should_stop() -> bool:
    """Return whether to save and to exit with code 0. After a rank got a signal, all ranks get True at the same step.

    All ranks call this after each step; `saved.batches(...)` does so for you. Within `with state(...)`, it also saves
    the snapshots and checkpoints that are due.

    Raises:
        RuntimeError: torch.distributed is not initialized but the run has several ranks.
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
