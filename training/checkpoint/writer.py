"""Writes checkpoints and snapshots while the training continues. Runs on every rank.

A StateWriter captures the state and starts to copy it to host memory; a thread writes the copy to a destination. Rank 0
writes checkpoints, and the first rank of each node writes that node's snapshots. If the state is sharded, every rank
writes its shards.

A copy from a GPU runs on its own CUDA stream. Before the state changes again, the GPU waits for the copy
(`TrainState.wait_for_copies`); the thread that trains does not.
"""

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrelay.background_writer import BackgroundWriter
from torchrelay.checkpoint_files import make_private, missing_snapshot_bytes, save_checkpoint
from torchrelay.restoring import remove_newer

from hpc.run.events.kinds import CheckpointFailed, CheckpointSaved, SnapshotOff
from training.checkpoint.host_copy import HostCopy, HostMemory
from training.checkpoint.shard_copies import ShardCopies
from training.checkpoint.sharded import ShardLayout, local_shards, save_sharded
from training.checkpoint.snapshot import lacking_space
from training.checkpoint.snapshot_files import SnapshotFiles
from training.checkpoint.state import TrainState
from training.config.save_interval import AUTO_OVERHEAD, Interval, parse_interval
from training.monitoring.run_logger import RunLogger
from training.runtime.console import Console
from training.runtime.process_group import ProcessGroup
from training.runtime.rank_device import DeviceCopy
from training.runtime.run_context import RunContext

# With --snapshot-every auto, copies may use the network, which the training needs, too, for 10 % of the time.
_SENDING_COST = AUTO_OVERHEAD / 0.1


def capture(state: TrainState, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any], ShardLayout]:
    """Return the present state. All ranks must call this; the host does not wait for a GPU.

    Batch statistics differ by rank, so rank 0's are saved. Buffers and the loss meter's tensors are copies: they
    change before `TrainState.wait_for_copies`. All other tensors are the training's own.

    Returns:
        The tensors (or this rank's shards) on the device, all other values for JSON, and the layout of the shards.

    Raises:
        SharedError: more images are unreadable than --max-corrupt-images.
    """
    tensors, values = state.state_dict()
    models = {"model/": state.model} | ({"ema/": state.ema.model} if state.ema else {})
    buffers = [prefix + name for prefix, model in models.items() for name, _ in model.named_buffers()]
    # Buffers that are not persistent, such as timm's position indices, are constants and not in the state.
    tensors |= group.broadcast_copies({name: tensors[name] for name in buffers if name in tensors})
    if state.sharded:
        tensors, layout = local_shards(tensors, group)
        return tensors, values, layout
    return tensors, values, ShardLayout()


# --- destinations ---


class CheckpointDestination:
    """Writes checkpoints to the run directory. If a write fails, the training continues."""

    skips_while_busy = False
    """Whether to skip a state, rather than wait, while the previous one is being written."""
    sending_seconds = 0.0
    """Seconds for which the last save used the network."""

    def __init__(self, context: RunContext, group: ProcessGroup, logger: RunLogger) -> None:
        self.interval = parse_interval("checkpoint_every", context.config.checkpoint_every)
        self._directory, self._keep = context.run_dir.checkpoints, context.config.keep_checkpoints
        self._fault, self._group, self._logger = context.fault, group, logger
        sharded = context.config.strategy == "fsdp"
        self._memory = HostMemory() if group.is_rank_zero or sharded else None
        self._save = partial(save_sharded, group.new_group()) if sharded else save_checkpoint

    def prepare(self, tensors: Mapping[str, Tensor], _layout: ShardLayout) -> HostMemory | None:
        """Wait until the best model, to which the state refers, is written.

        Returns the memory for the copy of the state, or None if this rank does not write.
        """
        self._logger.wait()
        return self._memory and self._memory.extended(tensors)

    def write(self, step: int, copy: HostCopy) -> None:
        """Write a checkpoint, then delete all but the newest --keep-checkpoints. Runs in the writer's thread.

        Raises:
            OSError: the checkpoint could not be written. No older one was deleted.
        """
        # The state refers to the metrics, which must be on the disk first.
        self._logger.wait_for_metrics()

        def write_files(directory: Path) -> None:
            copy.write(directory, replicated=self._group.is_rank_zero)
            self._fault.inject("save", step, self._group.rank)

        self._save(self._directory, step, write_files, self._keep, check=self._logger.check_is_newest)

    def report(self, step: int, seconds: dict[str, float], problem: str) -> None:
        """Record the saved checkpoint with its durations (`seconds`, by name), or record and warn of the problem."""
        if not problem:
            self._logger.event(
                CheckpointSaved(step=step, seconds=seconds["seconds"], copy_seconds=seconds["copy_seconds"])
            )
            return
        self._logger.console.warn(
            f"the checkpoint of step {step} was not saved ({problem}): free some space below {self._directory}"
        )
        self._logger.event(CheckpointFailed(step=step, reason=problem))


class SnapshotDestination:
    """Writes snapshots to a node's memory. If a write fails, the training continues without the snapshot."""

    sending_seconds = 0.0

    def __init__(self, context: RunContext, group: ProcessGroup, logger: RunLogger) -> None:
        shards = ShardCopies.of(context, group)
        self.directory = shards.own_directory if shards else snapshot_directory(context, group)
        self.interval = Interval()
        if self.directory:
            self.interval = parse_interval("snapshot_every", context.config.snapshot_every)
        self._copies = shards if shards and shards.are_kept and self.interval != Interval() else None
        self._copying, self._copying_group = False, group.new_group() if self._copies else group
        sharded = context.config.strategy == "fsdp"
        # No rank may skip a step alone: shards are usable only if all ranks have shards of the same step.
        self.skips_while_busy = not sharded
        self._group, self._logger = group, logger
        self._writers = group.rank_info.local_world_size if sharded else 1
        self._warned = self._warned_of_copies = False
        self._files = SnapshotFiles(self.directory) if self.directory else None
        # A GPU copies to pinned memory, from which the writer's thread copies to the file.
        self._pinned = HostMemory() if group.device.type == "cuda" else None

    def prepare(self, tensors: Mapping[str, Tensor], layout: ShardLayout) -> HostMemory | None:
        """Return the memory for the copy of the state, or None if this rank writes no snapshots or lacks the memory.

        Warns if it lacks the memory.
        """
        if not self._files:
            return None
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._copying = False
        if self._copies:
            # Each rank waits for the copy of another one, so all ranks must agree.
            reasons = self._group.all_gather_json(self._missing(self._files, size_bytes, self._copies.held_by_node))
            self._copying = not any(reasons)
            if not self._copying:
                self._warn_no_copies(next(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text))
        is_checked = self._copying or self._files.are_allocated
        problem = "" if is_checked else self._missing(self._files, size_bytes, self._writers)
        try:
            if not problem:
                return self._pinned.extended(tensors) if self._pinned else self._files.for_state(tensors, layout)
        except OSError as error:
            if self._copying:  # `write` tries again, and tells the other ranks if it fails, too
                return HostMemory().extended(tensors)
            problem = str(error)
        self._warn_off(problem)
        return None

    def _missing(self, files: SnapshotFiles, size_bytes: int, shards: int) -> str:
        """Return why `shards` snapshots of this size do not fit into this node's memory, or an empty text."""
        try:
            make_private(files.directory)
            own, others = size_bytes * self._writers, size_bytes * (shards - self._writers)
            new = 0 if files.are_allocated else own
            new += 0 if self._copies and self._copies.are_allocated else others
            pinned = own if self._pinned and self._pinned.is_new else 0
            return lacking_space(files.directory, missing_snapshot_bytes(files.directory, new), buffer_bytes=pinned)
        except OSError as error:
            return str(error)

    def write(self, step: int, copy: HostCopy) -> None:
        """Write a snapshot, and keep the newest two. Raises OSError if it cannot be written."""
        self._logger.wait_for_metrics()
        problem, self.sending_seconds = "", 0.0
        try:
            if self._files:
                self._files.save_state(step, copy)
        except OSError as error:
            problem = str(error)
        if self._copies and self._copying:
            began = time.monotonic()
            try:
                self._copies.copy_to_next_node(step, problem, self._copying_group)
            except OSError as error:
                self._warn_no_copies(str(error))
            self.sending_seconds = time.monotonic() - began
        if problem:
            raise OSError(problem)

    def report(self, _step: int, _seconds: dict[str, float], problem: str) -> None:
        """Warn of the problem."""
        if problem:
            self._warn_off(problem)

    def _warn_off(self, reason: str) -> None:
        """Warn, only once, that snapshots are off. Each later save still tries to write a snapshot."""
        if self._warned:
            return
        self._warned = True
        # The logger's console prints on rank 0 only, but this concerns the node of any rank.
        console = self._logger.console if self._group.is_rank_zero else Console(enabled=True)
        console.warn(f"snapshots are off on this node ({reason}): a crash may cost all steps since the last checkpoint")
        self._logger.event(SnapshotOff(reason=reason))

    def _warn_no_copies(self, reason: str) -> None:
        """Warn, only once and on rank 0, that nodes keep no copies of other nodes' shards."""
        if not self._warned_of_copies:
            self._warned_of_copies = True
            self._logger.console.warn(
                f"snapshots have no copies on other nodes ({reason}): a lost node may cost all steps since the last "
                "checkpoint"
            )

    def clear(self) -> None:
        """Remove the snapshots that this rank has written."""
        for directory in (self.directory, *(self._copies.kept_directories if self._copies else ())):
            if directory:
                remove_newer(directory, 0)


def snapshot_directory(context: RunContext, group: ProcessGroup) -> Path | None:
    """Return the directory for this node's snapshots of whole states; None if this rank writes none."""
    return context.node_dir.snapshots if context.node_dir and group.rank_info.local_rank == 0 else None


# --- when to write ---


class StateWriter:
    """Writes the states of a training to one destination."""

    def __init__(
        self, destination: CheckpointDestination | SnapshotDestination, state: TrainState, group: ProcessGroup
    ) -> None:
        self._destination, self._state, self._group = destination, state, group
        # CUDA gives each new thread the node's first GPU, on which every rank would then take memory.
        choose_device = partial(torch.cuda.set_device, group.device) if group.device.type == "cuda" else None
        self._copy, self._background = HostCopy(), BackgroundWriter(choose_device)
        self._unwritten_step: int | None = None
        # Ranks that compute on CPUs share them. So count a save's CPU time, not its waits for a CPU or another rank.
        self._clock = time.thread_time if group.device.type == "cpu" else time.monotonic
        self._stall_seconds = self._thread_seconds = 0.0
        self._device_copy: DeviceCopy | None = None
        self.restart_interval()

    def restart_interval(self, *, due: bool = False) -> None:
        """Restart the interval as after a save. If `due`, the step counts as unsaved, and a time interval as over."""
        self._saved_step = None if due else self._state.progress.step
        self._saved_at = -math.inf if due else time.monotonic()

    @property
    def cost_seconds(self) -> float:
        """Seconds that the last save took from the training. The GPU's wait for the copy counts once it is known."""
        waited = self._device_copy.stall_seconds if self._device_copy else 0.0
        sending = self._destination.sending_seconds * _SENDING_COST
        return self._stall_seconds + self._thread_seconds + waited + sending

    @property
    def is_saved(self) -> bool:
        """Whether `save` was called for this step, or the step counts as saved. All ranks agree on this."""
        return self._state.progress.step == self._saved_step

    def due_by_time(self) -> bool:
        """Return whether the interval has passed. Since the ranks' clocks differ, act on one rank's answer only."""
        interval = self._destination.interval
        if interval.seconds is None:
            return False
        min_interval = self.cost_seconds / interval.max_overhead if interval.max_overhead else 0.0
        return time.monotonic() - self._saved_at >= max(interval.seconds, min_interval)

    def due_by_step(self) -> bool:
        """Return whether the step is a multiple of the interval's steps."""
        steps = self._destination.interval.steps
        return steps is not None and self._state.progress.step % steps == 0

    def due_within(self, boundaries: int) -> bool:
        """Return whether a save will be due after `boundaries` more step boundaries, when all ranks have agreed on it.

        Return False while the last save is being written.
        """
        if self._background.busy:
            return False
        steps = self._destination.interval.steps
        if steps is not None and self._saved_step is not None:
            return self._state.progress.step + boundaries - self._saved_step >= steps
        return self.due_by_time()

    def save(self) -> float:
        """Start to save the state, unless it `is_saved`. All ranks must call this.

        A destination with `skips_while_busy` gets no state while the last one is being written. Returns the seconds
        that the copy took; for a copy from a GPU, the seconds to start it; 0 if there was no copy.

        Raises:
            SharedError: more images are unreadable than --max-corrupt-images.
        """
        step, began, copy_seconds = self._state.progress.step, time.monotonic(), 0.0
        if self.is_saved:
            return copy_seconds
        self._saved_step, self._saved_at, stall_began = step, began, self._clock()
        tensors, values, layout = capture(self._state, self._group)
        if self._destination.skips_while_busy and self._background.busy:
            return copy_seconds
        self.wait()
        allocates = False
        if memory := self._destination.prepare(tensors, layout):
            allocates = memory.is_new
            copying_since = time.monotonic()
            self._device_copy = self._copy.start(tensors, values, layout, memory)
            if self._device_copy:
                self._state.copies.append(self._device_copy)
            copy_seconds = time.monotonic() - copying_since
            self._background.submit(partial(self._write, step, copy_seconds))
        else:
            self._copy.memory = HostMemory()  # it may be that of a file that somebody has removed
        # Do not count a copy that allocates memory: it takes several times as long as most copies.
        self._stall_seconds = 0.0 if allocates else self._clock() - stall_began
        return copy_seconds

    def _write(self, step: int, copy_seconds: float) -> None:
        began, thread_began = time.monotonic(), time.thread_time()
        self._copy.wait()
        if not self._copy.is_finite:
            # The training has diverged and will end when it notices. Keep the older states, which are good.
            return
        problem = ""
        try:
            self._destination.write(step, self._copy)
        except OSError as error:
            # Not the error itself: it would keep the frames of its traceback, and so memory, until the next collection.
            problem = str(error) or repr(error)
        self._unwritten_step = step if problem else None
        seconds = {"seconds": round(time.monotonic() - began, 3), "copy_seconds": round(copy_seconds, 4)}
        self._destination.report(step, seconds, problem)
        # If ranks compute on CPUs, they share them with this thread, too.
        self._thread_seconds = time.thread_time() - thread_began if self._group.device.type == "cpu" else 0.0

    def wait(self) -> None:
        """Wait until the last state is written, or its write has failed."""
        self._background.wait()

    def finish(self) -> None:
        """Wait for the last state, and retry it once if its write failed: the disk may have space by now."""
        self.wait()
        if self._unwritten_step is not None:
            self._write(self._unwritten_step, 0.0)
