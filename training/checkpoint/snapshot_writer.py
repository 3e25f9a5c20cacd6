"""When a snapshot is taken, and its writing while the training goes on. Runs on every rank.

The first rank of every node writes, or with a sharded state each rank its part; rank 0 decides when.
"""

import math
import time
from functools import partial
from pathlib import Path

from training.checkpoint.capture import Capturer, HostCopy
from training.checkpoint.snapshot import KEPT, no_room, remove_newer
from training.checkpoint.storage import save_checkpoint
from training.config.rules import parse_interval
from training.monitoring.run_logger import RunLogger
from training.runtime.background_writer import BackgroundWriter
from training.runtime.console import Console
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

_MODE = 0o700


def part_directory(rank: int, world_size: int) -> str:
    """The name of a directory of snapshots of one rank's part."""
    return f"rank-{rank:05d}-of-{world_size:05d}"


def writing_directory(context: RunContext, group: ProcessGroup) -> Path | None:
    """Where this rank writes its node's snapshots, or those of its part; None: it does not."""
    if context.node_dir and context.config.strategy == "fsdp":
        return context.node_dir.snapshots / part_directory(group.rank, group.world_size)
    return context.node_dir.snapshots if context.node_dir and group.rank_info.local_rank == 0 else None


class SnapshotWriter:
    """Takes snapshots of a training. Where they cannot be written, the training goes on without."""

    def __init__(self, context: RunContext, capturer: Capturer, logger: RunLogger) -> None:
        self._capturer, self._logger = capturer, logger
        self._group, self._state = capturer.group, capturer.state
        self._directory = writing_directory(context, self._group)
        self._parents = (context.node_dir.path, context.node_dir.snapshots) if context.node_dir else ()
        self._every = parse_interval("snapshot_every", context.config.snapshot_every)
        self._final = context.run_dir.final_result
        self._copy, self._background = HostCopy(), BackgroundWriter()
        self._complained = False
        self._stall_seconds = self._writer_seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """Count from the present step on."""
        self._taken_step = self._state.progress.step
        self._taken_at = time.monotonic()

    def due(self) -> bool:
        """Whether rank 0 wants a snapshot after the step to come.

        Not while the last one is being written, nor the best model: a state that knows of one which nobody has is
        of no use.
        """
        if not (self._directory and self._group.is_rank_zero) or self._background.busy or self._logger.busy:
            return False
        if self._every.steps:
            return self._state.progress.step + 1 - self._taken_step >= self._every.steps
        if self._every.seconds is None:
            return False
        cost = self._stall_seconds + self._writer_seconds
        seconds = max(self._every.seconds, cost / self._every.largest_share if self._every.largest_share else 0.0)
        return time.monotonic() - self._taken_at >= seconds

    def take(self) -> None:
        """Begin to write a snapshot, unless this step has one. All ranks must call this at the same step."""
        step = self._state.progress.step
        if step == self._taken_step:
            return
        began = time.monotonic()
        self._taken_step, self._taken_at = step, began
        captured = self._capturer.capture()
        if self._state.sharded:
            # Parts are of use only where all have them of the same step: nobody leaves one out.
            self._background.wait()
        if self._directory and not self._background.busy and self._has_room(self._directory, captured.size):
            if not self._copy.has_memory:
                # The first one asks for memory, which takes its time; those to come use it again.
                began = math.inf
            self._state.defer_update_until(self._copy.take(captured))
            self._background.start(partial(self._write, self._directory, step))
        self._stall_seconds = max(0.0, time.monotonic() - began)

    def _has_room(self, directory: Path, size: int) -> bool:
        writers = self._group.rank_info.local_world_size if self._state.sharded else 1
        try:
            for path in (*self._parents, directory):
                path.mkdir(mode=_MODE, exist_ok=True)
            problem = no_room(directory, size * writers)
        except OSError as error:
            problem = str(error)
        if problem:
            self._complain(problem)
        return not problem

    def _write(self, directory: Path, step: int) -> None:
        began = time.thread_time()
        try:
            # A training that has diverged finds out by itself; until then the states before are the better ones.
            if math.isfinite(self._copy.finish()):
                save_checkpoint(directory, step, self._copy.write, KEPT, _MODE)
        except OSError as error:
            self._complain(str(error))
        # Where the ranks compute on the CPU, the writer takes it from them.
        self._writer_seconds = time.thread_time() - began if self._group.device.type == "cpu" else 0.0

    def _complain(self, reason: str) -> None:
        """Say once that there are no snapshots. It is tried anew each time."""
        if self._complained:
            return
        self._complained = True
        # Other nodes' ranks do not speak of the training, but of their node.
        console = self._logger.console if self._group.is_rank_zero else Console(enabled=True)
        console.warn(f"no snapshots on this node ({reason}): a crash may cost all steps since the last checkpoint")
        self._logger.event("snapshot_off", reason=reason)

    def wait(self) -> None:
        """Until the last one is written, or has failed to be."""
        self._background.wait()

    def end(self) -> None:
        """Remove all, if the training is complete. All ranks must call this."""
        complete = any(self._group.all_gather_object(self._group.is_rank_zero and self._final.exists()))
        self.wait()
        if complete and self._directory:
            remove_newer(self._directory, 0)
