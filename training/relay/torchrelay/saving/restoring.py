"""Finds the newest usable state, and restores it on all ranks. Runs on every rank.

The candidates are the checkpoints, which rank 0 sees, and the snapshots in the memory of the nodes. A snapshot is
complete if the nodes together hold all of its shards; a whole state is its own only shard. Each rank reads what it
needs from its node's memory. What a node lacks is sent to it. A state that is not usable is discarded, and the next
newest is tried.
"""

from __future__ import annotations  # torch is imported only when a function is called

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..checkpoint_files import (
    RANKS,
    STATE_TENSORS,
    STATE_VALUES,
    checkpoint_path,
    discard,
    file_names,
    find_damage,
    list_checkpoints,
    remove_published,
    remove_unpublished,
    step_of,
)
from ..rank_exchange import RankGroup
from .objects import Objects, begin_loading
from .shards import Block, Part, copy_common
from .tensor_files import TENSOR_FILES, SavedTensor, dtype_named, read_part, read_whole, saved_tensors
from .values import deserialized

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = 1
"""Number of the format of saved states, in their file of values."""
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A snapshot of a shard in a node's memory. A whole state is the only shard of itself."""

    step: int
    attempt: int
    """Number of the attempt that wrote it."""
    count: int
    """Number of shards of the state."""
    index: int
    path: Path


def shard_directory(snapshots: Path, index: int, count: int) -> Path:
    """Return a node's directory for the snapshots of a shard: that of all snapshots, if it is the whole state."""
    return snapshots if count == 1 else snapshots / f"shard-{index:05d}-of-{count:05d}"


def _directories(snapshots: Path) -> list[Path]:
    """Return a node's directories with snapshots: of whole states, and of each shard."""
    return [snapshots, *snapshots.glob("shard-*")]


def list_shards(snapshots: Path, damaged: Callable[[Path, str], object] = lambda _path, _reason: None) -> list[Shard]:
    """Return the intact snapshots in a node's memory. `damaged` is called for each other one, with the reason.

    The directory need not exist.
    """
    found = list[Shard]()
    for directory in _directories(snapshots):
        name = _SHARD.fullmatch(directory.name)
        index, count = map(int, name.groups()) if name else (0, 1)
        for path in list_checkpoints(directory):
            try:
                reason, values = find_damage(path), json.loads((path / STATE_VALUES).read_bytes())
                if values.get("format") != FORMAT:
                    reason = f"it has format {values.get('format')} instead of {FORMAT}"
            except (OSError, ValueError) as error:  # somebody removes it, or it is of another version
                reason, values = str(error), {}
            if reason:
                damaged(path, reason)
            else:
                found.append(Shard(step=step_of(path), attempt=values["attempt"], count=count, index=index, path=path))
    return found


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A saved state. Sorts by step; at the same step, a checkpoint is greater than a snapshot."""

    step: int
    durable: bool
    attempt: int = 0
    """For a snapshot, the attempt that wrote it. Shards of two attempts do not fit, even at the same step."""
    count: int = field(default=1, compare=False)
    holders: dict[int, list[int]] = field(default_factory=dict, compare=False)
    """For each shard of a snapshot, the first ranks of the nodes that hold it."""
    path: Path = field(default=Path(), compare=False)
    """Where rank 0 sees a checkpoint, and each rank its node's snapshot, if it has the whole one."""

    @property
    def source(self) -> str:
        """The kind of state: `checkpoint` or `snapshot`."""
        return "checkpoint" if self.durable else "snapshot"


class OtherFormatError(RuntimeError):
    """Another version of torchrelay has written the newest checkpoint."""


class _Unusable(Exception):  # noqa: N818  # it is caught, and the next state is tried
    """Why a state cannot be used. All ranks raise it together."""


@dataclass(kw_only=True)
class Restorer:
    """Restores the newest usable state. All ranks make the same calls."""

    peers: RankGroup
    checkpoints: Path | None
    """Directory of the checkpoints; None if there are none."""
    snapshots: Path | None
    """This node's directory of snapshots; None if there are none."""
    objects: Objects
    discarded: Callable[[Candidate, str], None]
    """Called on rank 0 with a state that is not usable, and the reason."""
    check: Callable[[Mapping[str, Any], Candidate], str] = lambda _values, _candidate: ""
    """Called on all ranks with the values of a state. Returns why it is not usable, or an empty text."""
    beat: Callable[[], object] = lambda: None
    """Called before each tensor is read."""
    is_half_loaded: bool = field(default=False, init=False)

    def restore(self) -> Candidate | None:
        """Load the newest usable state, and return it, or None if no state is usable. Removes newer snapshots.

        Raises:
            KeyError: the state was saved from objects of other names.
            OSError: a checkpoint cannot be read, but may be intact.
            RuntimeError: no state is usable, but tensors were already loaded from one.
        """
        mine, damaged = list[Shard](), dict[str, str]()
        if self.snapshots and self.peers.local_rank == 0:
            for directory in _directories(self.snapshots):
                remove_unpublished(directory, "step-*")
            mine = list_shards(self.snapshots, lambda path, reason: damaged.update({str(path): reason}))
        for path, reason in (one for each in self.peers.all_gather_json(damaged) for one in each.items()):
            if self.peers.is_rank_zero:
                self.discarded(Candidate(step=step_of(Path(path)), durable=False, path=Path(path)), reason)
        candidates = self._candidates(mine)
        while candidates and not self._is_usable(candidates[-1], mine):
            candidates.pop()
        if self.is_half_loaded and not candidates:
            raise RuntimeError("no saved state can be read as a whole, and the objects have parts of one: start again")
        if self.snapshots and self.peers.local_rank == 0:
            remove_newer(self.snapshots, candidates[-1].step if candidates else 0)
        return candidates[-1] if candidates else None

    def _is_usable(self, candidate: Candidate, mine: list[Shard]) -> bool:
        """Load a state, or discard it."""
        origin = candidate.step, candidate.attempt, candidate.count
        paths = [shard for shard in mine if (shard.step, shard.attempt, shard.count) == origin]
        directories = {shard.index: shard.path for shard in paths}
        if candidate.durable:
            directories = {0: candidate.path}
        try:
            self._load(candidate, directories)
        except _Unusable as reason:
            if self.peers.is_rank_zero:
                self.discarded(candidate, str(reason))
            for path in directories.values() if self.peers.is_rank_zero or not candidate.durable else ():
                discard(path, durable=candidate.durable)
            return False
        return True

    def _candidates(self, mine: list[Shard]) -> list[Candidate]:
        """Return the states that the ranks can read together, the newest last. `mine` are this node's shards."""
        steps = list[int]()
        if self.checkpoints and self.peers.is_rank_zero:
            remove_unpublished(self.checkpoints, "step-*")
            steps = [step_of(path) for path in list_checkpoints(self.checkpoints)]
        shards = [(shard.step, shard.attempt, shard.count, shard.index) for shard in mine]
        every = self.peers.all_gather_json([steps, shards])
        holders: dict[tuple[int, int, int], dict[int, list[int]]] = {}
        for rank, (_, theirs) in enumerate(every):
            for step, attempt, count, index in theirs:
                holders.setdefault((step, attempt, count), {}).setdefault(index, []).append(rank)
        snapshots = [
            Candidate(
                step=step,
                durable=False,
                attempt=attempt,
                count=count,
                holders=held,
                path=checkpoint_path(self.snapshots or Path(), step),
            )
            for (step, attempt, count), held in holders.items()
            if len(held) == count
        ]
        checkpoints = self.checkpoints or Path()
        durable = [Candidate(step=step, durable=True, path=checkpoint_path(checkpoints, step)) for step in every[0][0]]
        return sorted([*snapshots, *durable])

    def _examine(self, checkpoint: Path) -> bool:
        """Return whether several ranks have written a checkpoint.

        Raises:
            OtherFormatError: on all ranks, if another version has written it.
        """
        number, problem = 0, ""
        with suppress(OSError, ValueError, KeyError):  # it cannot be read, or is damaged, which is noticed later
            if self.peers.is_rank_zero:
                names = file_names(checkpoint)
                number = sum(fnmatch(name, TENSOR_FILES) for name in names)
                if STATE_VALUES not in names:
                    problem = f"{', '.join(sorted(names))} instead of {STATE_TENSORS} and {STATE_VALUES}"
                elif (found := json.loads((checkpoint / STATE_VALUES).read_bytes()).get("format")) != FORMAT:
                    problem = f"format {found} instead of {FORMAT}"
        [number, problem], *_ = self.peers.all_gather_json([number, problem])
        if problem:
            raise OtherFormatError(f"{checkpoint.name} has {problem}: end the run with the version that began it")
        return bool(number > 1)

    def _load(self, candidate: Candidate, directories: dict[int, Path]) -> None:
        """Load a state from directories by the number of their shard.

        Raises:
            _Unusable: on all ranks.
            OSError: on all ranks, if a checkpoint cannot be read, but may be intact.
        """
        source = candidate.holders[0][0] if candidate.holders else 0
        if not candidate.durable:  # the first rank of each node has looked for the shards
            node = self.peers.all_gather_json({index: str(path) for index, path in directories.items()})
            directories = {
                int(index): Path(path) for index, path in node[self.peers.rank - self.peers.local_rank].items()
            }
        is_split = candidate.durable and self._examine(directories[0])
        text, every = b"", b""
        with _agreed(self.peers, candidate):
            if candidate.durable and (is_split or self.peers.is_rank_zero):
                # Ranks that have written a file each all see the storage, and share the check.
                share = (self.peers.rank, self.peers.world_size) if is_split else (0, 1)
                if problem := find_damage(directories[0], *share):
                    raise ValueError(problem)
            if self.peers.rank == source:
                text, own = (directories[0] / STATE_VALUES).read_bytes(), directories[0] / RANKS
                every = own.read_bytes() if own.exists() else b""
        text, every = (self.peers.broadcast_bytes(data, source) for data in (text, every))
        values, states = json.loads(text), deserialized(every) if every else [b""]
        if problem := next(filter(None, self.peers.all_gather_json(self.check(values, candidate))), ""):
            raise _Unusable(problem)
        content = _Content.of(self.peers, self.beat, candidate, directories)
        # If there are more ranks than at the save, some continue with the same state as others.
        loading = begin_loading(self.objects, values["objects"], states[self.peers.rank % len(states)], content.wholes)
        self.is_half_loaded = True
        content.read(loading.parts)
        loading.finish()
        self.is_half_loaded = False


@contextmanager
def _agreed(peers: RankGroup, candidate: Candidate) -> Iterator[None]:
    """Raise on all ranks if a rank cannot read a state. All ranks must enter the block.

    Raises:
        _Unusable: the state is damaged, or it is a snapshot.
        OSError: it is a checkpoint, and may be intact.
    """
    problem, is_damaged = "", True
    try:
        yield
    except (OSError, ValueError) as error:
        problem, is_damaged = str(error) or repr(error), not candidate.durable or not isinstance(error, OSError)
    for text, damaged in peers.all_gather_json([problem, is_damaged]):
        if text and damaged:
            raise _Unusable(text)
        if text:
            raise OSError(f"{candidate.path} cannot be read ({text}): start the run again when it can")


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The tensors of a state, and where this rank can read them."""

    peers: RankGroup
    beat: Callable[[], object]
    candidate: Candidate
    directories: Mapping[int, Path]
    """By the number of the shard, the directories that this rank can read."""
    shards: Mapping[int, Mapping[str, tuple[torch.dtype, Block]]]
    """For each shard of a snapshot, its tensors by name. A checkpoint counts as one shard with whole tensors."""

    @classmethod
    def of(
        cls, peers: RankGroup, beat: Callable[[], object], candidate: Candidate, directories: Mapping[int, Path]
    ) -> Self:
        """Find the tensors. All ranks must call this.

        Raises:
            _Unusable: on all ranks, if a file is damaged.
            OSError: on all ranks, if a checkpoint cannot be read.
        """
        readers = {0: 0} if candidate.durable else {index: ranks[0] for index, ranks in candidate.holders.items()}
        mine = dict[int, dict[str, Any]]()
        with _agreed(peers, candidate):
            for index in [index for index, reader in readers.items() if reader == peers.rank]:
                for name, [first, *_] in _saved(directories[index]).items():
                    block = first.block.as_whole if candidate.durable else first.block
                    mine.setdefault(index, {})[name] = str(first.kind), block.offset, block.shape, block.whole
        shards: dict[int, dict[str, tuple[torch.dtype, Block]]] = {}
        for described in peers.all_gather_json(mine):
            for index, tensors in described.items():
                shards[int(index)] = {
                    name: (dtype_named(kind), Block(offset=tuple(offset), shape=tuple(shape), whole=tuple(whole)))
                    for name, (kind, offset, shape, whole) in tensors.items()
                }
        return cls(peers=peers, beat=beat, candidate=candidate, directories=directories, shards=shards)

    @property
    def wholes(self) -> dict[str, Tensor]:
        """The whole tensors, on the meta device: with a shape and a dtype, but without memory."""
        import torch

        return {
            name: torch.empty(block.whole, dtype=kind, device="meta")
            for tensors in self.shards.values()
            for name, (kind, block) in tensors.items()
        }

    def read(self, targets: Mapping[str, Part]) -> None:
        """Read what this rank needs. All ranks must call this.

        Raises:
            _Unusable: on all ranks, if a file is damaged, or is a snapshot's and cannot be read.
            OSError: on all ranks, if a checkpoint cannot be read.
        """
        is_sharded = any(self.peers.all_gather_json(any(not part.block.is_whole for part in targets.values())))
        if self.candidate.durable and is_sharded:
            # All ranks see the checkpoints: each reads what it needs.
            with _agreed(self.peers, self.candidate):
                saved = _saved(self.directories[0])
                for name, part in targets.items():
                    self.beat()
                    read_part(part, saved[name])
            return
        needed, here = set[int](), set() if self.candidate.durable else set(self.directories)
        with _agreed(self.peers, self.candidate):
            needed = self._needed(targets, here)
        missing = sorted({index for each in self.peers.all_gather_json(sorted(needed - here)) for index in each})
        with _agreed(self.peers, self.candidate):
            for index in missing:
                self._receive(index, targets)
            for index in needed - set(missing):
                for name, [saved_tensor] in _saved(self.directories[index]).items():
                    self.beat()
                    if name in targets and saved_tensor.block.common(targets[name].block):
                        copy_common(targets[name], *saved_tensor.read(targets[name].block))

    def _needed(self, targets: Mapping[str, Part], here: set[int]) -> set[int]:
        """Return the shards that this rank needs; `here` are on its node. Raises ValueError if one is missing."""
        needed = set[int]()
        for name, part in targets.items():
            blocks = {index: tensors[name][1] for index, tensors in self.shards.items() if name in tensors}
            whole = [index for index, block in blocks.items() if block.is_whole]
            if whole:
                needed.add(next((index for index in whole if index in here), whole[0]))
                continue
            sizes = {index: block.common_size(part.block) for index, block in blocks.items()}
            # Ranks that hold the same block may be parts of different shards (with tensor parallelism).
            distinct = {blocks[index].offset: size for index, size in sizes.items()}
            if sum(distinct.values()) != part.tensor.numel():
                raise ValueError(f"{name} is not complete")
            found = {blocks[index].offset for index in here & blocks.keys()}
            first = {block.offset: index for index, block in reversed(blocks.items())}
            needed |= {index for index in here & blocks.keys() if sizes[index]}
            needed |= {index for offset, index in first.items() if offset not in found and sizes[index]}
        return needed

    def _receive(self, index: int, targets: Mapping[str, Part]) -> None:
        """Send a shard from a rank that holds it to all others, each of which copies what it needs."""
        source = self.candidate.holders[index][0] if self.candidate.holders else 0
        tensors = self.shards[index]
        shapes = {name: (kind, block.shape) for name, (kind, block) in tensors.items()}
        saved = dict[str, list[SavedTensor]]()

        def read(name: str) -> Tensor:
            # Here, because an error of `read` is raised when the other ranks have received all.
            saved.update(saved or _saved(self.directories[index]))
            return read_whole(saved[name])

        for name, tensor in self.peers.broadcast_each(shapes, read, source):
            self.beat()
            if name in targets:
                copy_common(targets[name], tensor, tensors[name][1])


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the whole tensors of a state into host memory, by name, and its other values.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    values: dict[str, Any] = json.loads((directory / STATE_VALUES).read_bytes())
    return {name: read_whole(saved) for name, saved in _saved(directory).items()}, values


def _saved(directory: Path) -> dict[str, list[SavedTensor]]:
    """Return the tensors, or their shards, in the files of a state. Raises OSError; ValueError if one is damaged."""
    found = dict[str, list[SavedTensor]]()
    for file in sorted(directory.glob(TENSOR_FILES)):
        for name, saved in saved_tensors(file).items():
            found.setdefault(name, []).append(saved)
    return found


def remove_newer(snapshots: Path, step: int) -> None:
    """Remove a node's snapshots that are newer than `step`, and all unfinished ones."""
    for directory in _directories(snapshots):
        remove_unpublished(directory, "step-*")
        for path in list_checkpoints(directory):
            if step_of(path) > step:
                remove_published(path)
