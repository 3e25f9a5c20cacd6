"""Writes snapshots and checkpoints while the training continues. Runs on every rank.

The thread that trains captures the state, and copies it to the memory of the next snapshot; a GPU makes this copy while
the host goes on. A background thread publishes the snapshot, copies it to the next node if no other node has it, and to
the shared storage if it is to be a checkpoint.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint_files import RANKS, STATE_TENSORS, STATE_VALUES, fsync, make_private, save_checkpoint
from ..node_memory import lacking_space
from ..rank_exchange import all_gather_json, broadcast_bytes, ranks
from ..this_rank import THIS_RANK, check_no_later_attempt
from .background_writer import BackgroundWriter
from .holders import Holders
from .neighbour_copies import NeighbourCopies, write_all
from .objects import Captured
from .restoring import shard_directory
from .snapshot_files import SnapshotFiles
from .tensor_files import Image
from .values import serialized, uses_gpu

# Copies to the next node may use the network, which the training needs, too, for 10 % of the time, instead of 1 %.
_SENDING_COST = 0.1
FORMAT = 1
"""Number of the format of saved states, in their file of values."""


class Reports(Protocol):
    """Tells what the background thread has done. The training continues in each case."""

    def checkpoint_saved(self, step: int, seconds: float, copy_seconds: float) -> None:
        """Rank 0 has written a checkpoint: seconds of the write, and of the copy to memory before it."""

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """A rank could not write its part of a checkpoint."""

    def snapshots_off(self, reason: str) -> None:
        """This rank could not write a snapshot."""

    def copies_off(self, reason: str) -> None:
        """Rank 0 has noticed that nodes keep no copies of the shards of other nodes."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A state that is being written."""

    step: int
    durable: bool
    holders: Holders
    image: Image | None
    """The copy of what this rank holds; None if this rank writes nothing."""
    is_snapshot: bool
    """Whether the copy is in the memory of the next snapshot."""
    has_copies: bool
    """Whether nodes send their shards to the next node."""
    problem: str
    """Why this rank should have a snapshot but has none, or an empty text."""
    others: Mapping[str, bytes]
    """The other files of the state. They are equal on all ranks."""
    owned: Collection[str]
    """The tensors that this rank writes to a checkpoint."""
    copied: Any
    """The event after which a GPU has made the copy; None on a CPU."""
    copy_seconds: float


@dataclass(kw_only=True)
class StateWriter:
    """Writes the states of one training. All ranks call its methods at the same steps."""

    checkpoints: Path | None
    snapshots: Path | None
    """This node's directory of snapshots; None for no snapshots."""
    keep: int
    """Number of checkpoints to keep."""
    reports: Reports
    snapshot_cost_seconds: float = field(default=0.0, init=False)
    """Seconds that the last snapshot took from the training. Ranks on CPUs share them with the background threads."""
    size_bytes: int = field(default=0, init=False)
    """The bytes of the last state that this rank wrote."""
    failed_step: int | None = field(default=None, init=False)
    """The step of the last checkpoint if this rank could not write it."""
    _background: BackgroundWriter = field(default_factory=BackgroundWriter, init=False)
    _files: SnapshotFiles | None = field(default=None, init=False)
    _copies: NeighbourCopies | None = field(default=None, init=False)
    _group: Any = field(default=None, init=False)
    """Connects the background threads of all ranks; None for a single rank."""
    _holders: Holders | None = field(default=None, init=False)

    def connect(self) -> None:
        """Connect the background threads."""
        self._group = ranks.new_group()

    @property
    def busy(self) -> bool:
        """Whether a write is running or queued."""
        return self._background.busy

    def wait(self) -> None:
        """Wait until all is written, or its write has failed."""
        self._background.wait()

    def save(self, captured: Captured, extra: Mapping[str, Any], began: float, cpu_began: float, *, durable: bool) -> None:
        """Start to write a state as a snapshot and, if `durable`, as a checkpoint.

        Args:
            captured: the state. On a CPU, it may change when this returns; a GPU makes its copy before its later work.
            extra: more values for the file of values.
            began: time.monotonic() before the capture.
            cpu_began: time.thread_time() before the capture.
            durable: whether to write a checkpoint, too.
        """
        self.wait()  # until the last copy is written, its memory must not change
        holders = self._find_holders(captured)
        layout, image, problem, has_copies = captured.layout, None, "", False
        if self.snapshots:
            image, problem, has_copies = self._prepare_snapshot(holders, layout.size_bytes)
        is_snapshot = image is not None
        if durable and not image and holders.writes_checkpoint(THIS_RANK.rank):
            image = Image(layout.size_bytes)
        is_new = image is not None and image.is_new
        if image:
            self.size_bytes = layout.size_bytes
            image.fill(layout, captured.parts)
        values = {"format": FORMAT, "attempt": THIS_RANK.attempt, "world_size": THIS_RANK.world_size, **extra}
        others = {STATE_VALUES: json.dumps({**values, "objects": captured.values}).encode()}
        state = _Save(
            step=captured.step, durable=durable, holders=holders, image=image, is_snapshot=is_snapshot,
            has_copies=has_copies, problem=problem, others={**others, RANKS: serialized(captured.own)},
            owned=_owned(captured) if durable else (), copied=_event(), copy_seconds=time.monotonic() - began,
        )  # fmt: skip
        stall = time.monotonic() - began if uses_gpu() else time.thread_time() - cpu_began
        self._background.submit(partial(self._write, state, stall, is_new=is_new))

    def _find_holders(self, captured: Captured) -> Holders:
        """Return which rank holds what, and find out anew what this rank writes if that has changed."""
        if self._holders is None or self._holders.shards != tuple(captured.shards):
            first_ranks = all_gather_json(THIS_RANK.rank - THIS_RANK.local_rank)
            self._holders = Holders(tuple(captured.shards), tuple(sorted(set(first_ranks))))
            self._files, self._copies = None, None
            if self.snapshots:
                directory = shard_directory(self.snapshots, captured.shards[THIS_RANK.rank], self._holders.count)
                self._files = SnapshotFiles(directory) if THIS_RANK.rank in self._holders.snapshot_writers else None
                self._copies = NeighbourCopies(self.snapshots, self._group)
        return self._holders

    def _prepare_snapshot(self, holders: Holders, size_bytes: int) -> tuple[Image | None, str, bool]:
        """Return the memory of the next snapshot, why there is none if there should be one, and whether copies are kept.

        All ranks must call this.
        """
        files, problem, has_copies = self._files, "", bool(holders.keepers)
        new = files.missing_bytes(size_bytes) if files else 0
        reasons = _lacking(self.snapshots, new), ""
        if holders.count > 1:
            sizes = all_gather_json(size_bytes)
            copied = self._copies.missing_bytes(holders, THIS_RANK.rank, sizes) if self._copies else 0
            every = all_gather_json([new, copied])
            of_node = [every[rank] for rank in holders.ranks_of(holders.node_of(THIS_RANK.rank))]
            without, with_copies = sum(own for own, _ in of_node), sum(map(sum, of_node))
            mine = _lacking(self.snapshots, without), _lacking(self.snapshots, with_copies)
            # The first rank of a node decides for it: while others look, ranks of the node already take the memory.
            of_nodes = [all_gather_json(mine)[first] for first in holders.nodes]
            reasons = of_nodes[holders.node_of(THIS_RANK.rank)]
            if has_copies and (reason := next((text for _, text in of_nodes if text), "")):
                has_copies = False
                if THIS_RANK.rank == 0:
                    self.reports.copies_off(reason)
        if not files:
            return None, "", has_copies
        problem = reasons[0]
        try:
            image = None if problem else files.image(size_bytes)
        except OSError as error:
            image, problem = None, str(error) or repr(error)
        if problem:
            self.reports.snapshots_off(problem)
        return image, problem, has_copies

    # --- in the background thread ---

    def _write(self, state: _Save, stall_seconds: float, *, is_new: bool) -> None:
        began, cpu_began = time.monotonic(), time.thread_time()
        if state.copied:
            state.copied.synchronize()
        problem = state.problem
        if state.is_snapshot and self._files:
            try:
                self._files.publish(state.step, partial(write_all, contents=state.others))
            except OSError as error:
                problem = str(error) or repr(error)
                self.reports.snapshots_off(problem)
        sending_seconds = 0.0
        if self._copies and state.holders.count > 1:
            sending_seconds = self._send(self._copies, state, problem)
        if not is_new:
            # A copy to new memory does not count: it takes several times as long as those that follow.
            thread_seconds = 0.0 if uses_gpu() else time.thread_time() - cpu_began
            self.snapshot_cost_seconds = stall_seconds + thread_seconds + sending_seconds * _SENDING_COST
        if state.durable and self.checkpoints:
            self._write_checkpoint(self.checkpoints, state, began)

    def _send(self, copies: NeighbourCopies, state: _Save, problem: str) -> float:
        """Send the shards to the next nodes, or only wait until all ranks have theirs. Returns the seconds of sending.

        The snapshot before is overwritten only by the next one: until then, there is a snapshot that all nodes have.
        """
        began = time.monotonic()
        try:
            copies.exchange(state.step, state.holders, state.image, state.others, problem, sends=state.has_copies)
        except OSError as error:
            if THIS_RANK.rank == 0 and state.has_copies:
                self.reports.copies_off(str(error))
        return time.monotonic() - began if state.has_copies else 0.0

    def _write_checkpoint(self, directory: Path, state: _Save, began: float) -> None:
        try:
            if state.holders.count > 1:
                self._write_parts(directory, state)
            elif state.image and THIS_RANK.rank == 0:
                write = partial(_write_state, state, STATE_TENSORS)
                save_checkpoint(directory, state.step, write, self.keep, 0o700, check=check_no_later_attempt)
        except OSError as error:
            self.failed_step = state.step
            self.reports.checkpoint_failed(state.step, str(error) or repr(error))
            return
        self.failed_step = None
        if THIS_RANK.rank == 0:
            self.reports.checkpoint_saved(state.step, time.monotonic() - began, state.copy_seconds)

    def _write_parts(self, directory: Path, state: _Save) -> None:
        """Write a checkpoint of which each rank writes a part. Rank 0 makes the directory, and publishes it.

        All ranks must see the same storage.

        Raises:
            OSError: on all ranks, if a rank could not write. All older checkpoints are kept.
        """
        failure: Exception | None = None
        if THIS_RANK.rank == 0:

            def write(temporary: Path) -> dict[str, Any]:
                broadcast_bytes(os.fsencode(temporary), 0, self._group)
                entries = dict[str, Any]()
                for of_rank, problem in all_gather_json(_write_part(state, temporary), self._group):
                    if problem:
                        raise OSError(problem)
                    entries |= of_rank
                write_all(temporary, state.others)
                return entries

            try:
                save_checkpoint(directory, state.step, write, self.keep, 0o700, check=check_no_later_attempt)
            except (OSError, RuntimeError) as error:  # a later attempt has begun
                failure = error
            broadcast_bytes(b"", 0, self._group)  # ends the loop of the other ranks, even if no path was sent
        else:
            while temporary := broadcast_bytes(None, 0, self._group):
                all_gather_json(_write_part(state, Path(os.fsdecode(temporary))), self._group)
        if problem := all_gather_json(str(failure) if failure else "", self._group)[0]:
            raise failure or OSError(problem)


def _write_part(state: _Save, directory: Path) -> tuple[dict[str, Any], str]:
    """Write what this rank owns durably. Returns its entry of the manifest, and why it failed or an empty text."""
    name = f"state-{THIS_RANK.rank:05d}-of-{THIS_RANK.world_size:05d}.safetensors"
    if not state.owned:
        return {}, ""
    try:
        entries = _write_state(state, name, directory, others={})
        fsync(directory / name)
    except OSError as error:
        return {}, f"rank {THIS_RANK.rank}: {str(error) or repr(error)}"
    return entries, ""


def _write_state(state: _Save, name: str, directory: Path, others: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Write the tensors that this rank owns to a file, and the other files. Returns the manifest's entry for the first."""
    write_all(directory, state.others if others is None else others)
    return {name: state.image.write(directory / name, state.owned)} if state.image else {}


def _owned(captured: Captured) -> Collection[str]:
    """Return the tensors that this rank writes to a checkpoint: no lower rank holds the same block of them."""
    if max(captured.shards) == 0:
        return captured.parts.keys() if THIS_RANK.rank == 0 else ()
    every = all_gather_json({name: part.block.offset for name, part in captured.parts.items()})
    lower = {(name, tuple(offset)) for blocks in every[: THIS_RANK.rank] for name, offset in blocks.items()}
    return {name for name, part in captured.parts.items() if (name, part.block.offset) not in lower}


def _lacking(directory: Path | None, size_bytes: int) -> str:
    """Return why the node's memory cannot take this much more, or an empty text."""
    if directory is None or size_bytes == 0:
        return ""
    try:
        make_private(directory)
        return lacking_space(directory, size_bytes)
    except OSError as error:
        return str(error) or repr(error)


def _event() -> Any:
    """Return an event after which the GPU has made the copies so far; None on a CPU."""
    import torch

    if not uses_gpu():
        return None
    # A thread that waits for an event usually keeps a core of the training busy.
    return torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
