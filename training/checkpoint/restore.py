"""Finds the newest usable state, and loads it on all ranks. Runs on every rank.

The candidates are rank 0's checkpoints, and the snapshots of each node's first rank. The rank that has the newest
candidate reads it and broadcasts it to the others, tensor by tensor from file to device. A candidate that is not usable
is discarded, and the next newest is tried. So one rank at a time reads, and no rank needs the storage of another one.

If the state is sharded, all candidates are rank 0's. From a checkpoint, which must be on storage that all ranks see,
each rank reads the parts that it needs. A snapshot is a candidate if the nodes together hold all of its shards; each
node is sent the shards that it lacks (`training.checkpoint.shard_copies`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torchrelay.checkpoint_files import discard, file_names, find_damage, list_checkpoints
from torchrelay.restoring import Candidate, find_candidates, restore_newest

from hpc.base.errors import TorchrelayError, UserError
from hpc.run.events.kinds import CheckpointRejected
from hpc.run.rundir import STATE_TENSORS, STATE_VALUES
from training.checkpoint.shard_copies import ShardCopies
from training.checkpoint.sharded import read_full, read_shards
from training.checkpoint.snapshot import missing_results, remove_others
from training.checkpoint.state import TrainState
from training.checkpoint.writer import snapshot_directory
from training.monitoring.run_logger import RunLogger
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext


@dataclass(frozen=True)
class Restorer:
    """Finds and loads the newest usable state. All ranks make the same calls."""

    context: RunContext
    state: TrainState
    group: ProcessGroup
    logger: RunLogger

    def restore(self) -> Candidate | None:
        """Load the newest usable state, and return it, or None if no state is usable. All ranks must call this.

        A snapshot is usable if its metrics, validation and best model are in the run directory. Unusable snapshots, and
        snapshots newer than the restored step, are removed.

        Raises:
            SharedError: the newest checkpoint belongs to a run with other data or settings, or to another version.
            TorchrelayError: the storage cannot be read.
        """
        directory = None if self.shards else snapshot_directory(self.context, self.group)
        restored = restore_newest(self.candidates(), self.load, self.group.control, directory)
        node = self.context.node_dir
        if node and self.group.rank_info.local_rank == 0:
            if self.shards:
                self.shards.remove_newer(restored.step if restored else 0)
            # Remove this node's other snapshots, which ranks of another world size or strategy wrote.
            full = {path.name for path in list_checkpoints(node.snapshots)}
            remove_others(node.snapshots, self.shards.names if self.shards else full)
        return restored

    @cached_property
    def shards(self) -> ShardCopies | None:
        """The snapshots of shards in the memory of all nodes; None if the state is not sharded."""
        return ShardCopies.of(self.context, self.group)

    def candidates(self) -> list[Candidate]:
        """Return the states that this rank can offer, the newest last."""
        checkpoints = self.context.run_dir.checkpoints if self.group.is_rank_zero else None
        if not self.shards:
            return find_candidates(self.group.rank, checkpoints, snapshot_directory(self.context, self.group))
        snapshots = [
            Candidate(step=step, durable=False, rank=0, path=self.shards.snapshot(step)) for step in self.shards.find()
        ]
        return sorted(find_candidates(0, checkpoints, None) + snapshots) if self.group.is_rank_zero else []

    def shards_of(self, candidate: Candidate) -> ShardCopies | None:
        """Return the shards of a sharded snapshot; None for any other state."""
        return None if candidate.durable else self.shards

    def load(self, candidate: Candidate) -> bool:
        """Load a state on all ranks and return True. If it is not usable, discard it and return False."""
        path, shards = candidate.path, self.shards_of(candidate)
        if shards:
            path = shards.snapshot(candidate.step)
            try:
                for _ in self.context.beat_with_each("start", shards.gather(candidate.step)):
                    pass
            except OSError as error:
                self.discard(candidate, path, str(error))
                return False
        with self.group.raise_on_all_ranks():
            text, found, problem = self.examine(candidate, path)
        problem = next(filter(None, self.group.all_gather_json(problem)), "")
        values = {} if problem else json.loads(self.group.broadcast_bytes(text, candidate.rank))
        if not problem and not candidate.durable:
            missing = missing_results(values, self.context.run_dir) if self.group.is_rank_zero else ""
            problem = self.group.all_gather_json(missing)[0]
        if problem:
            self.discard(candidate, path, problem)
            return False
        if not self.state.sharded:
            tensors = self.broadcast(found, candidate.rank)
        elif shards:
            try:
                tensors = shards.read(candidate.step, self.state)
            except (OSError, SafetensorError) as error:
                problem = str(error) or repr(error)
            if problem := next(filter(None, self.group.all_gather_json(problem)), ""):
                self.discard(candidate, path, problem)
                return False
        else:
            tensors = read_shards(path, self.state)
        self.state.load_state_dict(tensors, values)
        return True

    @torch.no_grad()
    def broadcast(self, found: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Copy the tensors `found` on rank `source` into the state's memory on every rank, and return them."""
        allocate, tensors = self.state.allocator(), dict[str, Tensor]()
        received = self.group.broadcast_tensors(found, source)
        for name, value in self.context.beat_with_each("start", received):
            tensors[name] = allocate(name, value).copy_(value)
        return tensors

    def examine(self, candidate: Candidate, path: Path) -> tuple[bytes, dict[str, Tensor], str]:
        """Return a state's values and tensors (empty if another rank offers it), and its problem or an empty text."""
        is_own, text, tensors = candidate.rank == self.group.rank, b"", dict[str, Tensor]()
        try:
            if self.state.sharded:
                # Ranks share the check of a checkpoint's files, and read the tensors later.
                share = (self.group.rank, self.group.world_size) if candidate.durable else (0, 1)
                problem = find_damage(path, *share)
            else:
                problem = find_damage(path) if is_own else ""
            if is_own and not problem:
                text, tensors = _read(path, with_tensors=not self.state.sharded)
                self.state.check_compatible(json.loads(text), path.name)
        except (OSError, TorchrelayError) as error:
            # The storage does not answer, or the flags do not fit the state. If it is a snapshot, another state will be
            # tried. If it is a checkpoint, the training must end, and tell the user.
            if not candidate.durable:
                return b"", {}, str(error)
            if isinstance(error, OSError):
                raise TorchrelayError(str(error)) from error
            raise
        return text, tensors, problem

    def discard(self, candidate: Candidate, path: Path, reason: str) -> None:
        """Warn, and reject a checkpoint or remove a snapshot, so that no attempt tries it again."""
        self.logger.console.warn(f"{candidate.source} {path} is not used: {reason}")
        self.logger.event(CheckpointRejected(path=str(path), reason=reason))
        if shards := self.shards_of(candidate):
            if self.group.rank_info.local_rank == 0:
                shards.discard(candidate.step)
        elif candidate.rank == self.group.rank:
            discard(path, durable=candidate.durable)


def _read(path: Path, *, with_tensors: bool) -> tuple[bytes, dict[str, Tensor]]:
    """Return the values of an intact state (JSON) and, if `with_tensors`, its full tensors, joined from shards.

    Raises:
        UserError: another version of the trainer made the state.
        TorchrelayError: the storage cannot be read.
    """
    try:
        names = file_names(path)
        if STATE_VALUES not in names:
            raise UserError(
                f"{path.name} has {', '.join(sorted(names))} instead of {STATE_TENSORS} and {STATE_VALUES}: "
                "end the run with the version that began it, or use another --run-dir"
            )
        return (path / STATE_VALUES).read_bytes(), read_full(path) if with_tensors else {}
    except (OSError, SafetensorError) as error:
        raise TorchrelayError(f"{path} cannot be read ({error}): start the run again when it can") from error
