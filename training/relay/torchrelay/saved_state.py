"""Owns the `with state(...)` block: restores the objects, and saves them while they change. Runs on every rank."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar, Self

from .loop_position import Batch, LoopPosition
from .progress_files import progress_files
from .rank_exchange import ranks
from .saving.interval import SaveTimes, check_numbers
from .saving.objects import Objects, Saveable, check_restorable
from .saving.owner import Owner
from .saving.restoring import Restorer
from .saving.state_writer import StateWriter
from .this_rank import THIS_RANK, check_no_later_attempt

# Largest share of the time for snapshots.
_MAX_OVERHEAD = 0.01


class SavedState:
    """Restores the objects of a `with state(...)` block when it begins, and saves them while it runs."""

    step: int
    """The number of optimizer steps done."""
    active: ClassVar["SavedState | None"] = None
    """The `with state(...)` block that this process is in, or None."""

    def __init__(
        self, objects: dict[str, Saveable], checkpoint_seconds: float, snapshot_seconds: float, keep: int
    ) -> None:
        check_numbers("state", checkpoint_seconds=checkpoint_seconds, snapshot_seconds=snapshot_seconds)
        check_numbers("state", least=1, is_whole=True, keep=keep)
        self.step = 0
        self._position = LoopPosition(objects)
        self._asked = 0, 0
        """What the ranks have agreed to save as soon as they can: for a checkpoint and a snapshot, 1 or 0."""
        self._stops = False
        self._objects = {**objects, "epochs and batches": self._position}
        self._checkpoint_seconds, self._snapshot_seconds = checkpoint_seconds, snapshot_seconds
        self._keep = keep
        self._writer: StateWriter | None = None

    def __enter__(self) -> Self:
        """Restore the newest state, if one exists.

        Raises:
            RuntimeError: torch.distributed is not initialized but the run has several ranks; or a later attempt has
                begun.
            TypeError: an object's state could be saved but not restored. Each save checks this again.
            OtherRankError: another rank has raised such an error.
            KeyError: the state was saved from objects of other names.
        """
        if THIS_RANK.run_dir is None:
            return self
        ranks.connect("state()")
        began = time.monotonic()
        check_no_later_attempt()
        objects, owner = Objects.of_script(self._objects), Owner()
        with ranks.peers.raise_together():
            check_restorable(objects)
        self._writer = StateWriter(
            peers=ranks.peers, objects=objects, checkpoints=THIS_RANK.checkpoints,
            snapshots=THIS_RANK.snapshots if self._snapshot_seconds else None,
            keep=self._keep, owner=owner, attempt=THIS_RANK.attempt,
            checkpoint_times=SaveTimes(seconds=self._checkpoint_seconds),
            snapshot_times=SaveTimes(seconds=self._snapshot_seconds, max_overhead=_MAX_OVERHEAD),
        )  # fmt: skip
        source = Restorer(
            peers=ranks.peers, objects=objects, checkpoints=THIS_RANK.checkpoints, snapshots=THIS_RANK.snapshots,
            owner=owner,
        ).restore()  # fmt: skip
        self.step = source.step if source else 0
        self._writer.begin(source, self._done if source else None)
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
        if self._writer and is_done:
            ranks.connect("state()").wait()
            self._writer.wait_and_forget_failed()
            self.save(durable=True)
            self._writer.wait()
            if self._writer.unwritten:
                raise OSError(self._writer.unwritten)
            ranks.record_stop(self.step)
        # Release the process groups before Python shuts down: their threads would abort the process then.
        self._writer = None

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
        writer = self._writer
        if THIS_RANK.rank != 0 or writer is None or writer.busy or any(self._asked):
            return 0, 0
        return int(writer.checkpoint_is_due), int(writer.snapshot_is_due)

    @property
    def _done(self) -> tuple[int, int]:
        """The steps done, and the epochs done. An epoch is done when the script's loop asks for the next one."""
        return self.step, self._position.epoch

    def stops(self) -> bool:
        """Return whether the script may stop now. After a signal to one rank, all must call this until it is True."""
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
        return not any(ranks.peers.all_gather_json(self._position.is_open))

    def save(self, *, durable: bool) -> None:
        """Save a checkpoint (`durable`) or snapshot, unless the last one has this step and epoch. All ranks call this.

        A failed write raises no error here: another checkpoint is written when the next one is due, and at the end.
        """
        if self._writer and (copy := self._writer.save(self.step, durable=durable, position=self._done)):
            copy.make_device_wait()  # the script may change the state in any way


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
        ranks.connect("should_stop()")
        progress_files.beat(saved.step if saved else None)
        checkpoint, snapshot = saved.due() if saved else (0, 0)
        if agreed := ranks.agree("should_stop()", save=checkpoint, snapshot=snapshot):
            if saved:
                saved.save_agreed(agreed.save, agreed.snapshot)
            return False
    return saved is None or saved.stops()


def _exit_if_asked() -> None:
    if should_stop():
        sys.exit(0)
