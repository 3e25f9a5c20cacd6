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
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint_files import (
    RANKS,
    STATE_TENSORS,
    STATE_VALUES,
    fsync,
    make_private,
    remove_published,
    save_checkpoint,
)
from ..node_memory import lacking_space
from ..rank_exchange import RankGroup
from .background_writer import BackgroundWriter
from .device_copy import DeviceCopy
from .holders import Holders
from .neighbour_copies import NeighbourCopies, write_all
from .objects import Captured, Objects, capture
from .restoring import FORMAT, shard_directory
from .snapshot_files import KEPT, SnapshotFiles
from .tensor_files import Image
from .values import serialized, uses_gpu

if TYPE_CHECKING:
    from torch import Tensor


class Owner(Protocol):
    """The training whose states are written. The background thread calls these methods."""

    def check(self) -> None:
        """Raise an error if this attempt may not write any more."""

    def accepts(self, tensors: Mapping[str, "Tensor"]) -> bool:
        """Return whether a captured state is to be written; `tensors` is empty on a rank that writes none."""

    def publishing(self, step: int) -> None:
        """Called before a checkpoint, whose files are written, is published."""

    def checkpoint_saved(self, step: int, seconds: float, copy_seconds: float) -> None:
        """Called on rank 0, with the seconds of the write, and of the capture before it."""

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Called if this rank could not write its part of a checkpoint. The training continues."""

    def snapshot_saved(self, step: int, node_bytes: int) -> None:
        """Called on rank 0 when its node has a snapshot. All snapshots take `node_bytes` of its node's memory."""

    def snapshots_off(self, reason: str) -> None:
        """Called if this rank could not write a snapshot. Each later save tries again."""

    def copies_off(self, reason: str) -> None:
        """Called on rank 0 if nodes keep no copies of the shards of other nodes."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A state that is being written."""

    captured: Captured
    """Kept until the GPU has made the copy, so that the memory of its tensors is not used again before."""
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
    copied: DeviceCopy | None
    """The copy that a GPU still makes; None on a CPU."""
    stall_seconds: float
    """What the capture took from the training."""
    copy_seconds: float

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self.captured.step


@dataclass(kw_only=True)
class StateWriter:
    """Writes the states of one training. All ranks call its methods at the same steps."""

    peers: RankGroup
    checkpoints: Path | None
    snapshots: Path | None
    """This node's directory of snapshots; None for no snapshots."""
    keep: int
    """Number of checkpoints to keep."""
    owner: Owner
    attempt: int
    prepare_thread: Callable[[], None] | None = None
    """Called in the background thread when it starts."""
    node_bytes: int = field(default=0, init=False)
    """The bytes of this node's memory for snapshots, copies of other nodes' shards included."""
    unwritten: str = field(default="", init=False)
    """Why this rank could not write its part of the last checkpoint, or an empty text."""
    sending_seconds: float = field(default=0.0, init=False)
    """Seconds for which the last save used the network."""
    _cost_seconds: float = field(default=0.0, init=False)
    _device_copy: DeviceCopy | None = field(default=None, init=False)
    _files: SnapshotFiles | None = field(default=None, init=False)
    _copies: NeighbourCopies | None = field(default=None, init=False)
    _holders: Holders | None = field(default=None, init=False)
    _stream: Any = field(default=None, init=False)
    _has_snapshots: bool = field(default=False, init=False)
    _has_removed_others: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Start the background thread, and connect it to those of the other ranks."""
        self._background = BackgroundWriter(self.prepare_thread)
        self._background_peers = self.peers.new_group()

    @property
    def cost_seconds(self) -> float:
        """Seconds that the last snapshot took from the training. A GPU's wait for the copy counts once it is known."""
        return self._cost_seconds + (self._device_copy.stall_seconds if self._device_copy else 0.0)

    @property
    def busy(self) -> bool:
        """Whether a write is running or queued."""
        return self._background.busy

    def wait(self) -> None:
        """Wait until all is written, or its write has failed."""
        self._background.wait()

    def save(
        self, objects: Objects, step: int, extra: Mapping[str, Any] | None = None, *, durable: bool
    ) -> DeviceCopy | None:
        """Start to write the present state as a snapshot and, if `durable`, as a checkpoint. All ranks must call this.

        Args:
            objects: those to save.
            step: the number of optimizer steps done.
            extra: more values for the file of values.
            durable: whether to write a checkpoint, too.

        Returns:
            The copy for which a GPU must wait before it changes the state; None on a CPU, where the copy is made.

        Raises:
            TypeError, RuntimeError: as `capture`.
        """
        began, cpu_began = time.monotonic(), time.thread_time()
        captured = capture(objects, step, self.peers)
        holders = self._find_holders(captured)
        if self.busy and not durable and holders.count == 1:
            return None  # a whole state is of use without those of other nodes
        self.wait()  # until the last copy is written, its memory must not change
        layout, image, problem, has_copies = captured.layout, None, "", False
        if self._has_snapshots:
            image, problem, has_copies = self._prepare_snapshot(holders, layout.size_bytes)
        is_snapshot = image is not None
        if durable and not image and holders.writes_checkpoint(self.peers.rank):
            image = Image(layout.size_bytes)
        is_new = image is not None and image.is_new
        if image:
            self._fill(image, captured)
        self._device_copy = DeviceCopy(self._stream) if image and self._stream else None
        values = {"format": FORMAT, "attempt": self.attempt, "world_size": self.peers.world_size, **(extra or {})}
        others = {STATE_VALUES: json.dumps({**values, "objects": captured.values}).encode()}
        if any(captured.own):
            others[RANKS] = serialized(captured.own)
        on_gpu = uses_gpu()
        stall = time.monotonic() - began if on_gpu else time.thread_time() - cpu_began
        state = _Save(
            captured=captured, durable=durable, holders=holders, image=image, is_snapshot=is_snapshot,
            has_copies=has_copies, problem=problem, others=others, owned=self._owned(captured) if durable else (),
            copied=self._device_copy, copy_seconds=time.monotonic() - began,
            # A copy to new memory does not count: it takes several times as long as those that follow.
            stall_seconds=0.0 if is_new else stall,
        )  # fmt: skip
        self._background.submit(partial(self._write, state, on_gpu=on_gpu))
        return self._device_copy

    def _fill(self, image: Image, captured: Captured) -> None:
        """Copy the state to memory. A GPU does this in a stream of its own."""
        import torch

        if not any(part.tensor.is_cuda for part in captured.parts.values()):
            image.fill(captured.layout, captured.parts)
            return
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            image.fill(captured.layout, captured.parts)

    def _find_holders(self, captured: Captured) -> Holders:
        """Return which rank holds what, and find out again where this rank writes if that has changed."""
        if self._holders is None or self._holders.shards != tuple(captured.shards):
            every = self.peers.all_gather_json([self.peers.rank - self.peers.local_rank, bool(self.snapshots)])
            holders = Holders(tuple(captured.shards), tuple(sorted({first for first, _ in every})))
            # Shards are of use only with those of all other nodes.
            snapshots = self.snapshots if holders.count == 1 or all(has for _, has in every) else None
            self._holders, self._has_snapshots = holders, snapshots is not None
            self._files, self._copies = None, None
            if snapshots and self.peers.rank in holders.snapshot_writers:
                shard = holders.shards[self.peers.rank]
                self._files = SnapshotFiles(shard_directory(snapshots, shard, holders.count))
            if snapshots and holders.count > 1:
                self._copies = NeighbourCopies(snapshots, self._background_peers)
        return self._holders

    def _owned(self, captured: Captured) -> Collection[str]:
        """Return the tensors that this rank writes to a checkpoint: no lower rank holds the same block of them."""
        if max(captured.shards) == 0:
            return captured.parts.keys() if self.peers.is_rank_zero else ()
        every = self.peers.all_gather_json({name: part.block.offset for name, part in captured.parts.items()})
        lower = {(name, tuple(offset)) for blocks in every[: self.peers.rank] for name, offset in blocks.items()}
        return {name for name, part in captured.parts.items() if (name, part.block.offset) not in lower}

    def _prepare_snapshot(self, holders: Holders, size_bytes: int) -> tuple[Image | None, str, bool]:
        """Return the memory of the next snapshot, why this rank has none if it should, and whether to send copies.

        All ranks must call this.
        """
        files, problem, has_copies = self._files, "", bool(holders.keepers)
        new = files.missing_bytes(size_bytes) if files else 0
        self.node_bytes = KEPT * size_bytes
        if holders.count == 1:
            reasons = _lacking(self.snapshots, new), ""
        else:
            sizes = self.peers.all_gather_json(size_bytes)
            copied = self._copies.missing_bytes(holders, sizes) if self._copies else 0
            every = self.peers.all_gather_json([new, copied])
            node = holders.ranks_of(holders.node_of(self.peers.rank))
            of_node = [every[rank] for rank in node]
            written = [rank for rank in node if rank in holders.snapshot_writers]
            kept = [other for rank in node for other in holders.kept_by(rank)]
            self.node_bytes = KEPT * sum(sizes[rank] for rank in written + kept)
            without, with_copies = sum(own for own, _ in of_node), sum(map(sum, of_node))
            mine = _lacking(self.snapshots, without), _lacking(self.snapshots, with_copies)
            # The first rank of a node decides for it: while others look, ranks of the node already take the memory.
            answers = self.peers.all_gather_json(mine)
            of_nodes = [answers[first] for first in holders.nodes]
            reasons = of_nodes[holders.node_of(self.peers.rank)]
            if has_copies and (reason := next((text for _, text in of_nodes if text), "")):
                has_copies = False
                if self.peers.is_rank_zero:
                    self.owner.copies_off(reason)
        if not files:
            return None, "", has_copies
        problem = reasons[0]
        try:
            image = None if problem else files.image(size_bytes)
        except OSError as error:
            image, problem = None, str(error) or repr(error)
        if problem:
            self.owner.snapshots_off(problem)
        return image, problem, has_copies

    # --- in the background thread ---

    def _write(self, state: _Save, *, on_gpu: bool) -> None:
        began, cpu_began = time.monotonic(), time.thread_time()
        if state.copied:
            state.copied.wait()
        accepts = self.owner.accepts(state.image.tensors if state.image else {})
        if state.holders.count > 1:
            accepts = all(self._background_peers.all_gather_json(accepts))
        if not accepts:
            return
        problem = state.problem
        if state.is_snapshot and self._files:
            try:
                self._files.publish(state.step, partial(write_all, contents=state.others))
            except OSError as error:
                problem = str(error) or repr(error)
                self.owner.snapshots_off(problem)
        if self._copies:
            problem = self._send(self._copies, state, problem)
        if not problem and self.snapshots:
            self._remove_others(self.snapshots, state.holders)
        if not problem and state.is_snapshot and self.peers.is_rank_zero:
            self.owner.snapshot_saved(state.step, self.node_bytes)
        # Ranks that compute on CPUs share them with this thread.
        self._cost_seconds = state.stall_seconds + (0.0 if on_gpu else time.thread_time() - cpu_began)
        if state.durable and self.checkpoints:
            self._write_checkpoint(self.checkpoints, state, began)

    def _send(self, copies: NeighbourCopies, state: _Save, problem: str) -> str:
        """Send the shards to the next nodes, or only wait until all ranks have theirs. Returns why a rank has none.

        The snapshot before is overwritten only by the next one: until then, there is a snapshot that all nodes have.
        """
        began = time.monotonic()
        try:
            copies.exchange(state.step, state.holders, state.image, state.others, problem, sends=state.has_copies)
        except OSError as error:
            problem = str(error)
            if self.peers.is_rank_zero and state.has_copies:
                self.owner.copies_off(problem)
        self.sending_seconds = time.monotonic() - began if state.has_copies else 0.0
        return problem

    def _remove_others(self, snapshots: Path, holders: Holders) -> None:
        """Remove this node's snapshots of other shards: ranks of another number, or another strategy, wrote them."""
        if self._has_removed_others or self.peers.local_rank != 0:
            return
        self._has_removed_others = True
        node = holders.node_of(self.peers.rank)
        shards = {holders.shards[rank] for rank in holders.ranks_of(node)}
        shards |= {holders.shards[other] for rank in holders.ranks_of(node) for other in holders.kept_by(rank)}
        names = {shard_directory(snapshots, shard, holders.count) for shard in shards}
        for path in snapshots.iterdir() if snapshots.is_dir() else ():
            if path not in names and (holders.count > 1 or path.name.startswith("shard-")):
                remove_published(path)

    def _write_checkpoint(self, directory: Path, state: _Save, began: float) -> None:
        try:
            if state.holders.count > 1:
                self._write_parts(directory, state)
            elif state.image and self.peers.is_rank_zero:
                write = partial(self._write_state, state, STATE_TENSORS)
                save_checkpoint(directory, state.step, write, self.keep, 0o700, check=self.owner.check)
        except OSError as error:
            # Not the error itself: it would keep the frames of its traceback, and so memory.
            self.unwritten = str(error) or repr(error)
            self.owner.checkpoint_failed(state.step, self.unwritten)
            return
        self.unwritten = ""
        if self.snapshots:
            self._remove_others(self.snapshots, state.holders)
        if self.peers.is_rank_zero:
            self.owner.checkpoint_saved(state.step, time.monotonic() - began, state.copy_seconds)

    def _write_state(self, state: _Save, name: str, directory: Path) -> dict[str, Any]:
        """Write the tensors that this rank owns, and on rank 0 the other files. Returns entries of the manifest."""
        if self.peers.is_rank_zero:
            write_all(directory, state.others)
        entries = {name: state.image.write(directory / name, state.owned)} if state.image and state.owned else {}
        self.owner.publishing(state.step)
        return entries

    def _write_parts(self, directory: Path, state: _Save) -> None:
        """Write a checkpoint of which each rank writes a part. Rank 0 makes the directory, and publishes it.

        All ranks must see the same storage.

        Raises:
            OSError: on all ranks, if a rank could not write. All older checkpoints are kept.
        """
        peers, failure = self._background_peers, None
        if peers.is_rank_zero:

            def write(temporary: Path) -> dict[str, Any]:
                peers.broadcast_bytes(os.fsencode(temporary))
                results = peers.all_gather_json(self._write_part(state, temporary))
                if problem := next((problem for _, problem in results if problem), ""):
                    raise OSError(problem)
                return {name: entry for entries, _ in results for name, entry in entries.items()}

            try:
                save_checkpoint(directory, state.step, write, self.keep, 0o700, check=self.owner.check)
            except Exception as error:  # noqa: BLE001  # it is raised below, when the other ranks know
                failure = error
            # An empty path ends the loop below, on the other ranks, even if rank 0 failed before it sent any path.
            peers.broadcast_bytes(b"")
        else:
            while temporary := peers.broadcast_bytes(None):
                peers.all_gather_json(self._write_part(state, Path(os.fsdecode(temporary))))
        problem = peers.all_gather_json(str(failure) or repr(failure) if failure else "")[0]
        if problem:
            raise failure or OSError(problem)

    def _write_part(self, state: _Save, directory: Path) -> tuple[dict[str, Any], str]:
        """Write this rank's part durably. Returns its entries of the manifest, and why it failed or an empty text."""
        name = f"state-{self.peers.rank:05d}-of-{self.peers.world_size:05d}.safetensors"
        try:
            entries = self._write_state(state, name, directory)
            if entries:
                fsync(directory / name)
        except OSError as error:
            return {}, f"rank {self.peers.rank}: {str(error) or repr(error)}"
        return entries, ""


def _lacking(directory: Path | None, size_bytes: int) -> str:
    """Return why the node's memory cannot take this much more, or an empty text."""
    if directory is None or size_bytes == 0:
        return ""
    try:
        make_private(directory)
        return lacking_space(directory, size_bytes)
    except OSError as error:
        return str(error) or repr(error)
