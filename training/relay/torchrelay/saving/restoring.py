"""Finds the newest usable state, and restores it on all ranks. Runs on every rank.

The candidates are the checkpoints, which rank 0 sees, and the snapshots in the memory of the nodes. A snapshot is
complete if the nodes together hold all of its shards; a whole state is its own only shard. The files of a checkpoint
count as shards, too. Each rank reads the shards that it can read, and is sent the others that it needs. A state that is
not usable is discarded, and the next newest is tried.
"""

from __future__ import annotations  # torch is imported only when a function is called

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..checkpoint_files import (
    RANKS,
    STATE_TENSORS,
    STATE_VALUES,
    checkpoint_path,
    find_damage,
    list_checkpoints,
    manifest_entries,
    reject,
    remove_published,
    remove_unpublished,
    step_of,
)
from ..rank_exchange import RankGroup, reason_of
from .objects import Objects, begin_loading
from .owner import Owner
from .tensor_files import (
    TENSOR_FILES,
    Block,
    Part,
    SavedTensor,
    TensorFile,
    TensorLayout,
    copy_common,
    read_whole_tensors,
)
from .values import deserialized

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Number of the format of saved states, in their file of values."""
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


State = tuple[int, int, int]
"""Identifies a snapshot: its step, the attempt that wrote it, and its number of shards. A whole state is one shard."""
Holder = TypeVar("Holder")


def shard_directory(snapshots: Path, index: int, count: int) -> Path:
    """Return a node's directory for the snapshots of a shard: that of all snapshots, if it is the whole state."""
    return snapshots if count == 1 else snapshots / f"shard-{index:05d}-of-{count:05d}"


def _directories(snapshots: Path) -> list[Path]:
    """Return a node's directories with snapshots: of whole states, and of each shard."""
    return [snapshots, *snapshots.glob("shard-*")]


def list_shards(
    snapshots: Path, damaged: Callable[[Path, str], object] = lambda _path, _reason: None
) -> list[tuple[State, int, Path]]:
    """Return the intact snapshots in a node's memory: of which state, the number of the shard, and the directory.

    `damaged` is called for each other one, with the reason. The directory `snapshots` need not exist.
    """
    found = list[tuple[State, int, Path]]()
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
                found.append(((step_of(path), values["attempt"], count), index, path))
    return found


def whole_states(shards: Iterable[tuple[State, int, Holder]]) -> dict[State, dict[int, list[Holder]]]:
    """Return the states of which there are all shards, with the holders of each shard, by its number.

    Shards of two attempts do not fit, even at the same step.
    """
    states = dict[State, dict[int, list[Holder]]]()
    for state, index, holder in shards:
        states.setdefault(state, {}).setdefault(index, []).append(holder)
    return {state: held for state, held in states.items() if len(held) == state[2]}


def remove_newer(snapshots: Path, step: int) -> None:
    """Remove a node's snapshots that are newer than `step`, and all unfinished ones."""
    for directory in _directories(snapshots):
        remove_unpublished(directory, "step-*")
        for path in list_checkpoints(directory):
            if step_of(path) > step:
                remove_published(path)


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A saved state. Sorts by step; at the same step, a checkpoint is greater than a snapshot."""

    step: int
    durable: bool
    attempt: int = 0
    """For a snapshot, the attempt that wrote it."""
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
    objects: Objects
    checkpoints: Path | None
    """Directory of the checkpoints; None if there are none."""
    snapshots: Path | None
    """This node's directory of snapshots; None if there are none."""
    owner: Owner
    _is_half_loaded: bool = field(default=False, init=False)

    def restore(self) -> Candidate | None:
        """Load the newest usable state, and return it, or None if no state is usable. Removes newer snapshots.

        Raises:
            KeyError: the state was saved from objects of other names.
            OSError: a checkpoint cannot be read, but may be intact.
            RuntimeError: no state is usable, but tensors were already loaded from one.
        """
        candidates = self._candidates()
        while candidates and not self._is_usable(candidates[-1]):
            candidates.pop()
        if self._is_half_loaded and not candidates:
            raise RuntimeError("no saved state can be read as a whole, and the objects have parts of one: start again")
        if self.snapshots and self.peers.local_rank == 0:
            remove_newer(self.snapshots, candidates[-1].step if candidates else 0)
        return candidates[-1] if candidates else None

    def _candidates(self) -> list[Candidate]:
        """Return the states that the ranks can read together, the newest last."""
        steps, shards, damaged = list[int](), list[tuple[State, int]](), dict[str, str]()
        if self.checkpoints and self.peers.is_rank_zero:
            remove_unpublished(self.checkpoints, "step-*")
            steps = [step_of(path) for path in list_checkpoints(self.checkpoints)]
        if self.snapshots and self.peers.local_rank == 0:
            for directory in _directories(self.snapshots):
                remove_unpublished(directory, "step-*")
            found = list_shards(self.snapshots, lambda path, reason: damaged.update({str(path): reason}))
            shards = [(state, index) for state, index, _ in found]
        every = self.peers.all_gather_json([steps, shards, damaged])
        for _, _, reasons in every:
            for path, reason in reasons.items():
                self._report(Candidate(step=step_of(Path(path)), durable=False, path=Path(path)), reason)
        held = [(tuple(state), index, rank) for rank, (_, mine, _) in enumerate(every) for state, index in mine]
        snapshots = [
            Candidate(
                step=state[0], durable=False, attempt=state[1], count=state[2], holders=holders,
                path=checkpoint_path(self.snapshots or Path(), state[0]),
            )
            for state, holders in whole_states(held).items()
        ]  # fmt: skip
        paths = [checkpoint_path(self.checkpoints or Path(), step) for step in every[0][0]]
        return sorted([*snapshots, *(Candidate(step=step_of(path), durable=True, path=path) for path in paths)])

    def _report(self, candidate: Candidate, reason: str) -> None:
        """Warn, and record, that a state is not usable."""
        if self.peers.is_rank_zero:
            self.owner.warn(f"{candidate.source} {candidate.path} is not used: {reason}")
            self.owner.event("problem", what="checkpoint_rejected", detail=f"{candidate.path}: {reason}")

    def _is_usable(self, candidate: Candidate) -> bool:
        """Load a state, or discard it, so that no attempt reads it again."""
        try:
            self._load(candidate)
        except _Unusable as reason:
            self._report(candidate, str(reason))
            if not candidate.durable and self.peers.local_rank == 0:
                for path in self._shards_here(candidate).values():
                    remove_published(path)
            elif candidate.durable and self.peers.is_rank_zero:
                reject(candidate.path)
            return False
        return True

    def _shards_here(self, candidate: Candidate) -> dict[int, Path]:
        """Return the directories of a snapshot's shards in this node's memory."""
        first = self.peers.rank - self.peers.local_rank
        return {
            index: checkpoint_path(shard_directory(self.snapshots, index, candidate.count), candidate.step)
            for index, ranks in candidate.holders.items()
            if self.snapshots and first in ranks
        }

    def _files_of(self, checkpoint: Path) -> list[Path]:
        """Return the files of tensors of a checkpoint; none if its manifest is damaged. Raises OtherFormatError."""
        names, problem = list[str](), ""
        with suppress(OSError, ValueError, KeyError, TypeError):  # unreadable or damaged: noticed later
            if self.peers.is_rank_zero:
                names = sorted(manifest_entries(checkpoint))
                if STATE_VALUES not in names:
                    problem = f"{', '.join(names)} instead of {STATE_TENSORS} and {STATE_VALUES}"
                elif (found := json.loads((checkpoint / STATE_VALUES).read_bytes()).get("format")) != FORMAT:
                    problem = f"format {found} instead of {FORMAT}"
        [names, problem], *_ = self.peers.all_gather_json([names, problem])
        if problem:
            raise OtherFormatError(f"{checkpoint.name} has {problem}: end the run with the version that began it")
        return [checkpoint / name for name in names if fnmatch(name, TENSOR_FILES)]

    def _load(self, candidate: Candidate) -> None:
        """Load a state. Raises _Unusable or OSError as `_agreed`."""
        peers = self.peers
        if candidate.durable:
            paths = self._files_of(candidate.path)
            # Ranks that have written a file each all see the storage.
            files = dict(enumerate(paths)) if len(paths) > 1 or peers.is_rank_zero else {}
            sources = dict.fromkeys(range(len(paths)), 0)
        else:
            files = {index: path / STATE_TENSORS for index, path in self._shards_here(candidate).items()}
            sources = {index: ranks[0] for index, ranks in candidate.holders.items()}
        values, every = self._read_values(candidate, files, 0 if candidate.durable else sources[0])
        problems = peers.all_gather_json(self.owner.problem(values, candidate.path.name, durable=candidate.durable))
        if problem := next(filter(None, problems), ""):
            raise _Unusable(problem)
        content = _Content.of(peers, self.owner, candidate, files, sources)
        # If there are more ranks than at the save, some continue with the same state as others.
        parts, loads = begin_loading(self.objects, values["objects"], every[peers.rank % len(every)], content.wholes)
        self._is_half_loaded = True
        content.read(parts)
        for load in loads:
            load()
        self._is_half_loaded = False

    def _read_values(self, candidate: Candidate, files: Mapping[int, Path], source: int) -> tuple[Any, list[bytes]]:
        """Return the values of a state, and what each rank had of its own, from rank `source`."""
        peers = self.peers
        values = states = b""
        with _agreed(peers, candidate):
            if candidate.durable and (len(files) > 1 or peers.is_rank_zero):
                share = (peers.rank, peers.world_size) if len(files) > 1 else (0, 1)
                if problem := find_damage(candidate.path, *share):
                    raise ValueError(problem)
            if peers.rank == source:
                directory = candidate.path if candidate.durable else files[0].parent
                values, own = (directory / STATE_VALUES).read_bytes(), directory / RANKS
                states = own.read_bytes() if own.exists() else b""
        values, states = (peers.broadcast_bytes(data, source) for data in (values, states))
        return json.loads(values), deserialized(states) if states else [b""]


@contextmanager
def _agreed(peers: RankGroup, candidate: Candidate) -> Iterator[None]:
    """Make all ranks raise if a rank cannot read a state. All ranks must enter the block.

    Raises _Unusable if the state is damaged, or it is a snapshot; or OSError if it is a checkpoint, and may be intact.
    """
    problem, is_damaged = "", True
    try:
        yield
    except (OSError, ValueError) as error:
        problem, is_damaged = reason_of(error), not candidate.durable or not isinstance(error, OSError)
    for text, damaged in peers.all_gather_json([problem, is_damaged]):
        if text and damaged:
            raise _Unusable(text)
        if text:
            raise OSError(f"{candidate.path} cannot be read ({text}): start the run again when it can")


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The tensors of a state, and where this rank can read them."""

    peers: RankGroup
    owner: Owner
    candidate: Candidate
    sources: Mapping[int, int]
    """For each shard, the rank that sends it to the ranks that cannot read it."""
    shards: Mapping[int, Mapping[str, SavedTensor]]
    """For each shard, its tensors by name."""
    files: Mapping[int, TensorFile]
    """By the number of the shard, the files that this rank can read."""

    @classmethod
    def of(
        cls, peers: RankGroup, owner: Owner, candidate: Candidate, paths: Mapping[int, Path], sources: Mapping[int, int]
    ) -> Self:
        """Find the tensors in the files at `paths`, which this rank can read. All ranks must call this."""
        mine = dict[int, str]()
        with _agreed(peers, candidate):
            for index in (index for index, source in sources.items() if source == peers.rank):
                mine[index] = TensorFile(paths[index]).header.decode("latin-1")
        texts = {int(index): text for each in peers.all_gather_json(mine) for index, text in each.items()}
        headers = {index: text.encode("latin-1") for index, text in texts.items()}
        return cls(
            peers=peers, owner=owner, candidate=candidate, sources=sources,
            shards={index: TensorLayout.parse(header).tensors for index, header in headers.items()},
            files={index: TensorFile(path, headers[index]) for index, path in paths.items()},
        )  # fmt: skip

    @property
    def wholes(self) -> dict[str, Tensor]:
        """The whole tensors, on the meta device: with a shape and a dtype, but without memory."""
        import torch

        return {
            name: torch.empty(saved.block.whole, dtype=saved.kind, device="meta")
            for tensors in self.shards.values()
            for name, saved in tensors.items()
        }

    def read(self, targets: Mapping[str, Part]) -> None:
        """Read what this rank needs. All ranks must call this."""
        needed = set[int]()
        with _agreed(self.peers, self.candidate):
            needed = self._needed(targets)
        missing = self.peers.all_gather_json(sorted(needed - self.files.keys()))
        sent = sorted({index for indices in missing for index in indices})
        with _agreed(self.peers, self.candidate):
            for index in sent:
                self._receive(index, targets)
            for index in needed.difference(sent):
                for name in targets.keys() & self.files[index].tensors:
                    self.owner.beat()
                    self.files[index].read_into(targets[name], name)

    def _needed(self, targets: Mapping[str, Part]) -> set[int]:
        """Return the shards that this rank needs. Raises ValueError if one is missing."""
        needed = set[int]()
        for name, part in targets.items():
            sizes, holders = dict[Block, int](), dict[Block, int]()
            # Several shards may have the same block (with tensor parallelism). The files that can be read come last.
            for index in sorted(self.shards, key=self.files.__contains__):
                block = self.shards[index][name].block if name in self.shards[index] else None
                if block and (size := block.common_size(part.block)):
                    sizes[block], holders[block] = size, index
            if sum(sizes.values()) != part.tensor.numel():
                raise ValueError(f"{name} is not complete")
            needed.update(holders.values())
        return needed

    def _receive(self, index: int, targets: Mapping[str, Part]) -> None:
        """Send a shard from a rank that can read it to all others, each of which copies what it needs."""
        tensors = self.shards[index]
        shapes = {name: (saved.kind, saved.block.shape) for name, saved in tensors.items()}
        # Only the rank that sends the shard needs its file.
        read = lambda name: self.files[index].read(name)  # noqa: E731, PLW0108
        received = self.peers.broadcast_each(shapes, read, self.sources[index])
        for name, tensor in received:
            self.owner.beat()
            if name in targets:
                copy_common(targets[name], tensor, tensors[name].block)


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the whole tensors of a state into host memory, by name, and its other values.

    Raises OSError if a file cannot be read, or ValueError if a file is damaged.
    """
    values: dict[str, Any] = json.loads((directory / STATE_VALUES).read_bytes())
    return read_whole_tensors(directory), values
