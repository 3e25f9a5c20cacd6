"""Which saved state a training goes on from, and how all ranks come by it. Runs on every rank.

Rank 0 offers the checkpoints, the first rank of each node its snapshots. The newest one is read, by who offered it; if
it is of no use, the next newest. So nothing is read in vain, and no rank needs another one's storage.

With a sharded state every rank reads what it needs of a checkpoint, which all must see, and its own part of a snapshot:
that is on offer if all ranks have theirs.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hpc.core.errors import TorchrelayError
from hpc.core.files import remove_temporaries
from training.checkpoint.sharded_state import read_own_part, read_parts, read_whole
from training.checkpoint.snapshot import not_recorded, remove_newer, remove_others
from training.checkpoint.snapshot_writer import part_directory, writing_directory
from training.checkpoint.state import TrainState, check_identity, read_numbers
from training.checkpoint.storage import (
    NUMBERS,
    TENSORS,
    checkpoint_path,
    damage,
    list_checkpoints,
    read_checkpoint,
    read_file,
    set_aside,
    step_of,
)
from training.monitoring.run_logger import RunLogger
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

CHECKPOINT, SNAPSHOT = "checkpoint", "snapshot"


@dataclass(frozen=True, kw_only=True, order=True)
class StateOffer:
    """A saved state that a rank could read. The largest is taken: the newest, and of equals the most durable."""

    step: int
    durable: bool
    rank: int = field(compare=False)
    path: Path = field(compare=False)

    @property
    def source(self) -> str:
        """What it is."""
        return CHECKPOINT if self.durable else SNAPSHOT


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state that was taken."""

    name: str
    source: str
    numbers: dict[str, Any]


def restore(context: RunContext, state: TrainState, group: ProcessGroup, logger: RunLogger) -> Restored | None:
    """Become the newest state that is intact, belongs to this run and has its past on record. None: there is none.

    A snapshot that is of no use is removed, as are all of a later step than the restored one.

    Raises:
        SharedError: the newest checkpoint belongs to a run with other data or settings, or to another version.
        TorchrelayError: the storage does not give it.
    """
    directory = writing_directory(context, group)
    offers = _offers(context, group, directory, parts=state.sharded)
    restored = None
    while not restored and (
        best := max(filter(None, group.all_gather_object(offers[-1] if offers else None)), default=None)
    ):
        if best.rank == group.rank:
            offers.pop()
        restored = _take(best, context, state, group, logger)
    if directory:
        remove_newer(directory, state.progress.step)
    if context.node_dir and group.rank_info.local_rank == 0:
        here = range(group.rank, group.rank + group.rank_info.local_world_size)
        parts = {part_directory(rank, group.world_size) for rank in here}
        whole = {path.name for path in list_checkpoints(context.node_dir.snapshots)}
        remove_others(context.node_dir.snapshots, parts if state.sharded else whole)
    return restored


def _offers(context: RunContext, group: ProcessGroup, snapshots: Path | None, *, parts: bool) -> list[StateOffer]:
    """What this rank can read, the best last. Where snapshots are parts, rank 0 offers those that all ranks have."""
    places = {True: context.run_dir.checkpoints if group.is_rank_zero else None, False: snapshots}
    found = []
    for durable, directory in places.items():
        if directory:
            remove_temporaries(directory, "step-*")
            paths = list_checkpoints(directory)
            found += [StateOffer(step=step_of(path), durable=durable, rank=group.rank, path=path) for path in paths]
    if parts:
        # Of the same attempt: with other flags the same step is another one.
        saved_by = {offer: _saved_by(offer) for offer in found if not offer.durable}
        common = set.intersection(*group.all_gather_object(set(saved_by.values())))
        found = [offer for offer in found if group.is_rank_zero and (offer.durable or saved_by[offer] in common)]
    return sorted(found)


def _saved_by(offer: StateOffer) -> tuple[int, int]:
    """Which step and which attempt a snapshot is of; none that there is if it cannot be read."""
    try:
        return offer.step, json.loads((offer.path / NUMBERS).read_bytes())["attempt"]
    except (OSError, ValueError, KeyError):
        return offer.step, -1


def _take(
    offer: StateOffer, context: RunContext, state: TrainState, group: ProcessGroup, logger: RunLogger
) -> Restored | None:
    """Become the state on offer, on all ranks, unless it is of no use."""
    directory = writing_directory(context, group)
    path = checkpoint_path(directory, offer.step) if _is_part(offer, state) and directory else offer.path
    with group.raise_on_all_ranks():
        files, problem = _examine(offer, path, state, group)
    problem = next(filter(None, group.all_gather_object(problem)), "")
    numbers = {} if problem else json.loads(group.broadcast_bytes(files.get(NUMBERS), offer.rank))
    if not (problem or offer.durable):
        problem = group.all_gather_object(not_recorded(numbers, context.run_dir) if group.is_rank_zero else "")[0]
    if problem:
        _discard(offer, path, problem, logger, mine=offer.rank == group.rank or _is_part(offer, state))
        return None
    state.restore(_tensors(offer, path, files, state, group), numbers)
    return Restored(name=path.name, source=offer.source, numbers=numbers)


def _is_part(offer: StateOffer, state: TrainState) -> bool:
    """Whether each rank has a part of what is on offer, in a place of its own."""
    return state.sharded and not offer.durable


def _examine(offer: StateOffer, path: Path, state: TrainState, group: ProcessGroup) -> tuple[dict[str, bytes], str]:
    """The files of a state on offer, on the rank that offers it, or why it is of no use."""
    mine = offer.rank == group.rank
    try:
        if state.sharded:
            files, problem = _read_numbers(path, group if offer.durable else None, mine=mine)
        else:
            files, problem = _read(path) if mine else ({}, "")
        if files:
            numbers = read_numbers(files, path.name)
            check_identity(numbers["identity"], state.identity, path.name)
    except TorchrelayError as error:
        # Other flags than before are a mistake, to be undone; a snapshot is no reason to stop for.
        if offer.durable:
            raise
        return {}, str(error)
    return files, problem


def _read(path: Path) -> tuple[dict[str, bytes], str]:
    """The files of a whole state, or what is wrong with it. One that was saved in parts is put together."""
    files = read_checkpoint(path)
    if isinstance(files, str):
        return {}, files
    return (files if TENSORS in files or NUMBERS not in files else files | {TENSORS: save(read_whole(path))}), ""


def _read_numbers(path: Path, share: ProcessGroup | None, *, mine: bool) -> tuple[dict[str, bytes], str]:
    """The numbers of a state in parts, if they are asked for, or what is wrong with its files.

    Args:
        path: of the state.
        share: the ranks that share the work of looking at all files; None: this one does it alone.
        mine: whether this rank is asked for the numbers.
    """
    problem = damage(path, share.rank, share.world_size) if share else damage(path)
    # The tensors are read later, by who needs them.
    return ({TENSORS: b"", NUMBERS: read_file(path / NUMBERS)} if mine and not problem else {}), problem


def _tensors(
    offer: StateOffer, path: Path, files: dict[str, bytes], state: TrainState, group: ProcessGroup
) -> Mapping[str, Tensor]:
    """Those of the state on offer, which is intact, as this rank holds them."""
    if not state.sharded:
        return load(group.broadcast_bytes(files.get(TENSORS), offer.rank))
    return read_parts(path, state) if offer.durable else read_own_part(path, state, group)


def _discard(offer: StateOffer, path: Path, reason: str, logger: RunLogger, *, mine: bool) -> None:
    logger.console.warn(f"{offer.source} {path} is not used: {reason}")
    logger.event("checkpoint_rejected", path=str(path), reason=reason)
    if mine and offer.durable:
        set_aside(path)
    elif mine:
        shutil.rmtree(path, ignore_errors=True)
