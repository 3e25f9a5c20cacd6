"""Saves a training as snapshots and checkpoints while it continues, and restores it. Runs on every rank."""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrelay.progress_files import progress_files
from torchrelay.saving.interval import SaveTimes
from torchrelay.saving.restoring import Candidate, OtherFormatError, Restorer, remove_newer
from torchrelay.saving.state_writer import StateWriter

from hpc.base.errors import TorchrelayError, UserError
from hpc.run.events.kinds import CheckpointSaved, Problem, SnapshotOff
from training.checkpoint.snapshot import missing_results
from training.checkpoint.state import LOSS, TrainState
from training.config.save_interval import Interval, parse_interval
from training.monitoring.run_logger import RunLogger
from training.runtime.console import Console
from training.runtime.process_group import ProcessGroup, SharedError
from training.runtime.run_context import RunContext


class Saver:
    """The saved states of one training. All ranks make the same calls."""

    def __init__(self, context: RunContext, state: TrainState, group: ProcessGroup, logger: RunLogger) -> None:
        config, node = context.config, context.node_dir
        self._context, self._state, self._group, self._logger = context, state, group, logger
        self._snapshot_directory = node.snapshots if node else None
        self.checkpoints = _times_of(parse_interval("checkpoint_every", config.checkpoint_every))
        self.snapshots = _times_of(parse_interval("snapshot_every", config.snapshot_every) if node else Interval())
        self._warned = set[str]()
        # CUDA gives each new thread the node's first GPU, on which every rank would then take memory.
        choose_device = partial(torch.cuda.set_device, group.device) if group.device.type == "cuda" else None
        self.writer = StateWriter(
            peers=group,
            checkpoints=context.run_dir.checkpoints,
            snapshots=self._snapshot_directory if self.snapshots.steps or self.snapshots.seconds else None,
            keep=config.keep_checkpoints,
            owner=self,
            attempt=context.attempt,
            prepare_thread=choose_device,
        )

    # --- when to save ---

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether the time for a checkpoint has come. Since the ranks' clocks differ, act on one rank's answer only."""
        return self.checkpoints.due_by_time(self.writer.cost_seconds)

    def snapshot_is_due(self, boundaries: int) -> bool:
        """Return whether a snapshot will be due after `boundaries` more steps, when all ranks have agreed on it."""
        # No snapshot while the logger writes the best model: a restore rejects a snapshot whose best model is missing.
        if self.writer.busy or self._logger.busy:
            return False
        step = self._state.progress.step + boundaries
        return self.snapshots.due_after(step) or self.snapshots.due_by_time(
            self.writer.cost_seconds, self.writer.sending_seconds
        )

    @property
    def checkpoint_is_saved(self) -> bool:
        """Whether a checkpoint of this step is written, or is being written."""
        return self.checkpoints.is_saved(self._state.progress.step)

    # --- saving ---

    def save(self, *, durable: bool) -> float:
        """Start to save a checkpoint (`durable`) or snapshot, unless this step has one.

        Returns the seconds of the copy; for a copy from a GPU, the seconds to start it; 0 if there was no copy.

        Raises:
            SharedError: more images are unreadable than --max-corrupt-images.
        """
        step = self._state.progress.step
        times = self.checkpoints if durable else self.snapshots
        if times.is_saved(step):
            return 0.0
        for each in (times, self.snapshots):  # a checkpoint is a snapshot, too
            each.record(step)
        if durable:
            self._logger.wait()  # the state refers to the best model, which must be written first
        began = time.monotonic()
        if copy := self.writer.save(self._state.objects, step, {"identity": self._state.identity}, durable=durable):
            self._state.copies.append(copy)
        return time.monotonic() - began

    def finish(self) -> None:
        """Wait for the last checkpoint, and try it again once if its write failed: the disk may have space by now."""
        self.writer.wait()
        if any(self._group.all_gather_json(bool(self.writer.unwritten))):
            self.checkpoints.record(None, due=True)
            self.save(durable=True)
            self.writer.wait()

    def clear(self) -> None:
        """Remove all snapshots from this node's memory, once nothing writes any more."""
        self.writer.wait()
        self._group.all_gather_json(None)
        if self._snapshot_directory and self._group.local_rank == 0:
            remove_newer(self._snapshot_directory, 0)

    # --- what the writer's thread calls ---

    def check(self) -> None:
        """Raise SucceededError if a later attempt has begun."""
        self._logger.check_is_newest()

    def accepts(self, tensors: Mapping[str, Tensor]) -> bool:
        """Wait for the metrics, to which the state refers. If the loss is not finite, the training has diverged."""
        self._logger.wait_for_metrics()
        return LOSS not in tensors or math.isfinite(float(tensors[LOSS]))

    def publishing(self, step: int) -> None:
        """Let a test kill the rank."""
        self._context.fault.inject("save", step, self._group.rank)

    def checkpoint_saved(self, step: int, seconds: float, copy_seconds: float) -> None:
        """Record it."""
        self._logger.event(CheckpointSaved(step=step, seconds=round(seconds, 3), copy_seconds=round(copy_seconds, 4)))

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Record it, and warn."""
        self._logger.console.warn(
            f"the checkpoint of step {step} was not saved ({reason}): free some space below "
            f"{self._context.run_dir.checkpoints}"
        )
        self._logger.event(Problem(what="checkpoint_failed", step=step, detail=reason))

    def snapshot_saved(self, step: int, node_bytes: int) -> None:
        """Record it for `hpc status`."""
        progress_files.snapshot(step, node_bytes)

    def snapshots_off(self, reason: str) -> None:
        """Warn, only once. Each later save still tries to write a snapshot."""
        if "off" in self._warned:
            return
        self._warned.add("off")
        # The logger's console prints on rank 0 only, but this concerns the node of any rank.
        console = self._logger.console if self._group.is_rank_zero else Console(enabled=True)
        console.warn(f"snapshots are off on this node ({reason}): a crash may cost all steps since the last checkpoint")
        self._logger.event(SnapshotOff(reason=reason))

    def copies_off(self, reason: str) -> None:
        """Warn, only once."""
        if "no copies" not in self._warned:
            self._warned.add("no copies")
            self._logger.console.warn(
                f"snapshots have no copies on other nodes ({reason}): a lost node may cost all steps since the last "
                "checkpoint"
            )

    # --- restoring ---

    def restore(self) -> Candidate | None:
        """Load the newest usable state, and return it, or None if no state is usable.

        A snapshot is usable if its metrics, validation and best model are in the run directory.

        Raises:
            SharedError: the newest checkpoint belongs to a run with other data or settings, or to another version.
            TorchrelayError: the storage cannot be read.
        """
        restorer = Restorer(
            peers=self._group,
            checkpoints=self._context.run_dir.checkpoints,
            snapshots=self._snapshot_directory,
            objects=self._state.objects,
            discarded=self._discarded,
            check=self._problem,
            beat=partial(self._context.heartbeat.beat, "start"),
        )
        try:
            restored = restorer.restore()
        except OtherFormatError as error:
            raise SharedError(f"{error}, or use another --run-dir") from error
        except OSError as error:
            raise TorchrelayError(str(error)) from error
        step = self._state.progress.step
        # Only nodes' memory holds a restored snapshot: save a checkpoint soon, because a failed node may fail again.
        self.checkpoints.record(step, due=restored is not None and not restored.durable)
        self.snapshots.record(step)
        return restored

    def _problem(self, values: Mapping[str, Any], candidate: Candidate) -> str:
        """Return why a state is not usable, or an empty text. Raises SharedError on all ranks for a checkpoint."""
        try:
            with self._group.raise_on_all_ranks():
                if self._group.is_rank_zero:
                    self._state.check_compatible(values, candidate.path.name)
        except UserError as error:
            # The flags do not fit the state: another snapshot will be tried; a checkpoint needs the user.
            if candidate.durable:
                raise
            return str(error)
        if candidate.durable or not self._group.is_rank_zero:
            return ""
        return missing_results(values["objects"]["progress"], self._context.run_dir)

    def _discarded(self, candidate: Candidate, reason: str) -> None:
        self._logger.console.warn(f"{candidate.source} {candidate.path} is not used: {reason}")
        self._logger.event(Problem(what="checkpoint_rejected", detail=f"{candidate.path}: {reason}"))


def _times_of(interval: Interval) -> SaveTimes:
    return SaveTimes(steps=interval.steps, seconds=interval.seconds, max_overhead=interval.max_overhead)
