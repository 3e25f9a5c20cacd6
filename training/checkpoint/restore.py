"""Finds the newest usable state, and loads it on all ranks. Runs on every rank.

The candidates are rank 0's checkpoints, and the snapshots of each node's first rank. The rank that has the newest
candidate reads it and broadcasts it to the others, tensor by tensor from file to device. A candidate that is not usable
is discarded, and the next newest is tried. So one rank at a time reads, and no rank needs the storage of another one.

If the state is sharded, all candidates are rank 0's. From a checkpoint, which must be on storage that all ranks see,
each rank reads the parts that it needs. From a snapshot each rank reads its own shards; only snapshots that every rank
has are candidates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from hpc.base.errors import TorchrelayError, UserError
from hpc.run.events.kinds import CheckpointRejected
from hpc.run.rundir import STATE_TENSORS, STATE_VALUES
from training.checkpoint.sharded import read_full, read_own_shards, read_shards
from training.checkpoint.snapshot import missing_results, remove_others
from training.checkpoint.state import TrainState
from training.checkpoint.writer import shard_directory, snapshot_directory
from training.monitoring.run_logger import RunLogger
from training.relay.checkpoint_files import checkpoint_path, discard, file_names, find_damage, list_checkpoints
from training.relay.restoring import Candidate, find_candidates, restore_newest
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
        directory = snapshot_directory(self.context, self.group)
        restored = restore_newest(self.candidates(), self.load, self.group.control, directory)
        node, rank_info = self.context.node_dir, self.group.rank_info
        if node and rank_info.local_rank == 0:
            # Remove this node's other snapshots, which ranks of another world size or strategy wrote.
            ranks = range(self.group.rank, self.group.rank + rank_info.local_world_size)
            own = {shard_directory(rank, self.group.world_size) for rank in ranks}
            full = {path.name for path in list_checkpoints(node.snapshots)}
            remove_others(node.snapshots, own if self.state.sharded else full)
        return restored

    def candidates(self) -> list[Candidate]:
        """Return the states that this rank can offer, the newest last."""
        checkpoints = self.context.run_dir.checkpoints if self.group.is_rank_zero else None
        found = find_candidates(self.group.rank, checkpoints, snapshot_directory(self.context, self.group))
        if self.state.sharded:
            # Combine only shards of one attempt: two attempts may have had different flags, so that their states at the
            # same step differ.
            origins = {candidate: _step_and_attempt(candidate) for candidate in found if not candidate.durable}
            gathered = self.group.all_gather_json(list(origins.values()))
            common = set.intersection(*({(step, attempt) for step, attempt in each} for each in gathered))
            usable = [candidate for candidate in found if candidate.durable or origins[candidate] in common]
            found = usable if self.group.is_rank_zero else []
        return found

    def is_sharded_snapshot(self, candidate: Candidate) -> bool:
        """Return whether a state is a sharded snapshot, for which each rank has a directory of its own."""
        return self.state.sharded and not candidate.durable

    def load(self, candidate: Candidate) -> bool:
        """Load a state on all ranks and return True. If it is not usable, discard it and return False."""
        path, directory = candidate.path, snapshot_directory(self.context, self.group)
        if self.is_sharded_snapshot(candidate) and directory:
            path = checkpoint_path(directory, candidate.step)
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
        elif candidate.durable:
            tensors = read_shards(path, self.state)
        else:
            tensors = read_own_shards(path, self.state, self.group)
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
        if candidate.rank == self.group.rank or self.is_sharded_snapshot(candidate):
            discard(path, durable=candidate.durable)


def _step_and_attempt(candidate: Candidate) -> tuple[int, int]:
    """Return the step and the attempt of a snapshot. The attempt is -1 if the snapshot cannot be read."""
    try:
        return candidate.step, json.loads((candidate.path / STATE_VALUES).read_bytes())["attempt"]
    except (OSError, ValueError, KeyError):
        return candidate.step, -1


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
