"""Saves a training as snapshots and checkpoints while it continues, and restores it. Runs on every rank."""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrelay.saving.interval import SaveTimes
from torchrelay.saving.owner import Owner
from torchrelay.saving.restoring import Candidate, OtherFormatError, Restorer, remove_newer
from torchrelay.saving.state_writer import StateWriter

from hpc.base.errors import TorchrelayError, UserError
from hpc.run.events.kinds import CheckpointSaved, Problem, SnapshotOff
from training.checkpoint.snapshot import missing_results
from training.checkpoint.state import LOSS, TrainState
from training.config.rules import parse_interval
from training.monitoring.run_logger import Console, RunLogger
from training.runtime.process_group import ProcessGroup, SharedError
from training.runtime.run_context import RunContext

_EVENTS = {"checkpoint_saved": CheckpointSaved, "problem": Problem, "snapshot_off": SnapshotOff}


class Saver(Owner):
    """The saved states of one training. All ranks make the same calls."""

    def __init__(self, context: RunContext, state: TrainState, group: ProcessGroup, logger: RunLogger) -> None:
        super().__init__()
        config, node = context.config, context.node_dir
        self._context, self._state, self._group, self._logger = context, state, group, logger
        self._snapshot_directory = node.snapshots if node else None
        self.checkpoints = SaveTimes(**parse_interval("checkpoint_every", config.checkpoint_every))
        self.snapshots = SaveTimes(**(parse_interval("snapshot_every", config.snapshot_every) if node else {}))
        # CUDA gives each new thread the node's first GPU, on which every rank would then take memory.
        choose_device = partial(torch.cuda.set_device, group.device) if group.device.type == "cuda" else None
        self.writer = StateWriter(
            peers=group, objects=state.objects, checkpoints=context.run_dir.checkpoints,
            snapshots=self._snapshot_directory if self.snapshots.steps or self.snapshots.seconds else None,
            keep=config.keep_checkpoints, owner=self, attempt=context.attempt, extra={"identity": state.identity},
            checkpoint_times=self.checkpoints, snapshot_times=self.snapshots, prepare_thread=choose_device,
        )  # fmt: skip

    # --- when to save ---

    def snapshot_is_due(self, boundaries: int) -> bool:
        """Return whether a snapshot will be due after `boundaries` more steps, when all ranks have agreed on it."""
        # No snapshot while the logger writes the best model: a restore rejects a snapshot whose best model is missing.
        if self.writer.busy or self._logger.best.busy:
            return False
        return self.snapshots.due_after(self._state.progress.step + boundaries) or self.writer.snapshot_is_due

    # --- saving ---

    def save(self, *, durable: bool) -> float:
        """Start to save a checkpoint (`durable`) or snapshot, unless this step has one.

        Returns the seconds of the copy; for a copy from a GPU, the seconds to start it. Raises SharedError if more
        images are unreadable than --max-corrupt-images.
        """
        if durable:
            self._logger.best.wait()  # the state refers to the best model, which must be written first
        began = time.monotonic()
        if copy := self.writer.save(self._state.progress.step, durable=durable):
            self._state.copies.append(copy)
        return time.monotonic() - began

    def finish(self) -> None:
        """Wait for the last checkpoint, and try it again once if its write failed: the disk may have space by now."""
        if self.writer.wait_and_forget_failed():
            self.save(durable=True)
            self.writer.wait()

    def clear(self) -> None:
        """Remove all snapshots from this node's memory, once nothing writes any more."""
        self.writer.wait()
        self._group.all_gather_json(None)
        if self._snapshot_directory and self._group.local_rank == 0:
            remove_newer(self._snapshot_directory, 0)

    def restore(self) -> Candidate | None:
        """Load the newest usable state, and return it, or None if no state is usable.

        A snapshot is usable if its metrics, validation and best model are in the run directory. Raises SharedError if
        the newest checkpoint belongs to a run with other data or settings, or to another version; or TorchrelayError if
        the storage cannot be read.
        """
        restorer = Restorer(
            peers=self._group, objects=self._state.objects, checkpoints=self._context.run_dir.checkpoints,
            snapshots=self._snapshot_directory, owner=self,
        )  # fmt: skip
        try:
            restored = restorer.restore()
        except OtherFormatError as error:
            raise SharedError(f"{error}, or use another --run-dir") from error
        except OSError as error:
            raise TorchrelayError(str(error)) from error
        self.writer.begin(restored, self._state.progress.step)
        return restored

    # --- as the owner of the states ---

    def check(self) -> None:
        """Raise SucceededError if a later attempt has begun."""
        self._logger.check_is_newest()

    def accepts(self, tensors: Mapping[str, Tensor], /) -> bool:
        """Wait for the metrics, to which the state refers. If the loss is not finite, the training has diverged."""
        self._logger.metrics.wait()
        return LOSS not in tensors or math.isfinite(float(tensors[LOSS]))

    def publishing(self, step: int) -> None:
        """Let a test kill the rank."""
        self._context.fault.inject("save", step, self._group.rank)

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's ledger, on rank 0."""
        self._logger.event(_EVENTS[name](**fields))

    def warn(self, text: str) -> None:
        """Print a warning of any rank. The logger's console prints on rank 0 only."""
        Console(enabled=True).warn(text)

    def beat(self) -> None:
        """Show that this rank is alive while it restores a state."""
        self._context.heartbeat.beat("start")

    def problem(self, values: Mapping[str, Any], name: str, /, *, durable: bool) -> str:
        """Return why a state is not usable, or an empty text. Raises SharedError on all ranks for a checkpoint."""
        try:
            with self._group.raise_on_all_ranks():
                if self._group.is_rank_zero:
                    self._state.check_compatible(values, name)
        except UserError as error:
            # The flags do not fit the state: another snapshot will be tried; a checkpoint needs the user.
            if durable:
                raise
            return str(error)
        if durable or not self._group.is_rank_zero:
            return ""
        return missing_results(values["objects"]["progress"], self._context.run_dir)
