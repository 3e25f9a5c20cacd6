"""Writes snapshots and checkpoints while the training continues. Runs on every rank.

The training thread captures the state and copies it to the memory of the next snapshot. On a GPU, it does not wait for
the copy. A background thread publishes the snapshot, copies it to the next node if no other node has it, and writes it
to the shared storage if a checkpoint is due.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_files import (
    RANKS,
    STATE_TENSORS,
    STATE_VALUES,
    checkpoint_path,
    fsync,
    publish_checkpoint,
    unpublished_name,
    write_all,
)
from ..rank_exchange import OtherRankError, RankGroup, reason_of
from .interval import SaveTimes
from .node_snapshots import Holders, NodeSnapshots
from .objects import Captured, Objects, capture
from .owner import Owner
from .restoring import FORMAT, Candidate
from .tensor_files import Image
from .values import serialized, uses_gpu

if TYPE_CHECKING:
    import torch


class BackgroundWriter:
    """Runs writes in a thread, one at a time and in order. The thread calls `prepare` when it starts."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer", initializer=prepare)
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Wait for the previous write, and start this one. Raises the error of the previous write."""
        self.wait()
        self._pending = self._thread.submit(write)

    def enqueue(self, write: Callable[[], None]) -> None:
        """Queue a write after the previous one, and return at once. If the previous write fails, this one fails too."""
        previous = self._pending

        def run() -> None:
            if previous:
                previous.result()
            write()

        self._pending = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        """Whether a write is running or queued."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for all writes. Raises the error of the last one. Any thread may call this."""
        if pending := self._pending:
            pending.result()


class DeviceCopy:
    """A copy from a GPU in a CUDA stream. Measures how long the GPU's other work waits for the copy."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        import torch

        # A thread that waits for an event usually keeps a core of the training busy.
        self._copied: Any = stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        self._waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def make_device_wait(self) -> None:
        """Make the GPU's next work wait until the copy is complete. The host does not wait."""
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        began.record(current)
        current.wait_event(self._copied)
        ended.record(current)
        self._waited = began, ended

    def wait(self) -> None:
        """Make the host wait for the copy. Any thread may call this."""
        self._copied.synchronize()

    @property
    def stall_seconds(self) -> float:
        """Seconds that the GPU waited for the copy; 0 until it continues."""
        if self._waited is None:
            return 0.0
        began, ended = self._waited
        milliseconds: float = began.elapsed_time(ended) if ended.query() else 0.0  # type: ignore[no-untyped-call]
        return milliseconds / 1000


_ALONE = RankGroup(rank=0, local_rank=0, world_size=1, control=None)
"""The ranks that write a whole state: rank 0."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A state that is being written."""

    captured: Captured
    """Kept until the GPU has made the copy, so that the memory of its tensors is not used again before."""
    durable: bool
    holders: Holders
    image: Image | None
    """The copy of what this rank holds; None if this rank writes nothing."""
    others: Mapping[str, bytes]
    """The other files of the state. They are equal on all ranks."""
    owned: Collection[str]
    """The tensors that this rank writes to a checkpoint."""
    copied: DeviceCopy | None
    """The copy that a GPU still makes; None on a CPU."""
    stall_seconds: float
    """What the capture took from the training."""
    copy_seconds: float


@dataclass(kw_only=True)
class StateWriter:
    """Writes the states of one training. All ranks call its methods at the same steps."""

    peers: RankGroup
    objects: Objects
    checkpoints: Path | None
    snapshots: Path | None
    """This node's directory of snapshots; None for no snapshots."""
    keep: int
    """Number of checkpoints to keep."""
    owner: Owner
    attempt: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More values for the file of values."""
    checkpoint_times: SaveTimes = field(default_factory=SaveTimes)
    snapshot_times: SaveTimes = field(default_factory=SaveTimes)
    prepare_thread: Callable[[], None] | None = None
    """Called in the background thread when it starts."""
    unwritten: str = field(default="", init=False)
    """Why this rank could not write its part of the last checkpoint, or an empty text."""
    _cost_seconds: float = field(default=0.0, init=False)
    _device_copy: DeviceCopy | None = field(default=None, init=False)
    _node: NodeSnapshots | None = field(default=None, init=False)
    _holders: Holders | None = field(default=None, init=False)
    _stream: Any = field(default=None, init=False)

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

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether the time for a checkpoint has come. Since the ranks' clocks differ, act on one rank's answer only."""
        return self.checkpoint_times.due_by_time(self.cost_seconds)

    @property
    def snapshot_is_due(self) -> bool:
        """Whether the time for a snapshot has come, as for `checkpoint_is_due`."""
        sending_seconds = self._node.sending_seconds if self._node else 0.0
        return bool(self.snapshots) and self.snapshot_times.due_by_time(self.cost_seconds, sending_seconds)

    def begin(self, restored: Candidate | None, position: Any) -> None:
        """Begin the intervals after a restore; `position` is as for `save`, or None if it does not count as saved."""
        # Only nodes' memory holds a restored snapshot: save a checkpoint soon, because a failed node may fail again.
        self.checkpoint_times.record(position, due=restored is not None and not restored.durable)
        self.snapshot_times.record(position)

    def wait(self) -> None:
        """Wait until all is written, or its write has failed."""
        self._background.wait()

    def wait_and_forget_failed(self) -> bool:
        """Wait until all is written. Returns whether a rank could not write the last checkpoint: it is not saved."""
        self.wait()
        has_failed = any(self.peers.all_gather_json(bool(self.unwritten)))
        if has_failed:
            self.checkpoint_times.record(None)
        return has_failed

    def save(self, step: int, *, durable: bool, position: Any = None) -> DeviceCopy | None:
        """Start to write the present state as a snapshot and, if `durable`, as a checkpoint. All ranks must call this.

        Nothing is saved again at the same `position`, which is the step (of the optimizer) if it is None.

        Returns:
            The copy for which a GPU must wait before it changes the state; None on a CPU, where the copy is made.

        Raises:
            TypeError, RuntimeError: as `capture`.
        """
        position = step if position is None else position
        times = self.checkpoint_times if durable else self.snapshot_times
        if times.is_saved(position):
            return None
        for each in (times, self.snapshot_times):  # a checkpoint is a snapshot, too
            each.record(position)
        began, cpu_began = time.monotonic(), time.thread_time()
        captured = capture(self.objects, step, self.peers)
        holders = self._find_holders(captured)
        if self.busy and not durable and holders.count == 1:
            return None  # a whole state is of use without those of other nodes
        self.wait()  # until the last copy is written, its memory must not change
        image = self._node.prepare(captured.sizes) if self._node else None
        if durable and not image and holders.writes_checkpoint(self.peers.rank):
            image = Image(captured.layout.size_bytes)
        is_new = image is not None and image.is_new
        if image:
            self._fill(image, captured)
        self._device_copy = DeviceCopy(self._stream) if image and self._stream else None
        values = {"format": FORMAT, "attempt": self.attempt, "world_size": self.peers.world_size, **self.extra}
        others = {STATE_VALUES: json.dumps({**values, "objects": captured.values}).encode()}
        if any(captured.own):
            others[RANKS] = serialized(captured.own)
        on_gpu = uses_gpu()
        stall = time.monotonic() - began if on_gpu else time.thread_time() - cpu_began
        state = _Save(
            captured=captured, durable=durable, holders=holders, image=image, others=others,
            owned=self._owned(captured) if durable else (), copied=self._device_copy,
            copy_seconds=time.monotonic() - began,
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
            self._holders = Holders(tuple(captured.shards), tuple(sorted({first for first, _ in every})))
            self._node = None
            # Shards are of use only with those of all other nodes.
            if self.snapshots and (self._holders.count == 1 or all(has for _, has in every)):
                self._node = NodeSnapshots(
                    self.snapshots, self._holders, self.peers, self._background_peers, self.owner
                )
        return self._holders

    def _owned(self, captured: Captured) -> Collection[str]:
        """Return the tensors that this rank writes to a checkpoint: no lower rank holds the same block of them."""
        if max(captured.shards) == 0:
            return captured.parts.keys() if self.peers.is_rank_zero else ()
        every = self.peers.all_gather_json({name: part.block.offset for name, part in captured.parts.items()})
        lower = {(name, tuple(offset)) for blocks in every[: self.peers.rank] for name, offset in blocks.items()}
        return {name for name, part in captured.parts.items() if (name, part.block.offset) not in lower}

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
        if self._node:
            self._node.publish(state.captured.step, state.others)
        # Ranks that compute on CPUs share them with this thread.
        self._cost_seconds = state.stall_seconds + (0.0 if on_gpu else time.thread_time() - cpu_began)
        if state.durable and self.checkpoints:
            self._write_checkpoint(self.checkpoints, state, began)

    def _write_checkpoint(self, directory: Path, state: _Save, began: float) -> None:
        step = state.captured.step
        try:
            if state.holders.count > 1 or self.peers.is_rank_zero:
                self._write_parts(directory, state)
        except (OSError, OtherRankError) as error:
            # Not the error itself: it would keep the frames of its traceback, and so memory.
            self.unwritten = reason_of(error)
            self.owner.event("problem", what="checkpoint_failed", step=step, detail=self.unwritten)
            if self.peers.is_rank_zero:
                self.owner.warn(
                    f"the checkpoint of step {step} was not saved ({self.unwritten}), and is tried again later: if the "
                    f"disk is full, free some space below {directory}"
                )
            return
        self.unwritten = ""
        if self._node:
            self._node.remove_others()
        seconds, copy_seconds = round(time.monotonic() - began, 3), round(state.copy_seconds, 4)
        self.owner.event("checkpoint_saved", step=step, seconds=seconds, copy_seconds=copy_seconds)

    def _write_parts(self, directory: Path, state: _Save) -> None:
        """Write a checkpoint, of which each rank writes its shard to the same storage. Rank 0 publishes it."""
        peers, step, image = self._background_peers, state.captured.step, state.image
        name = f"state-{peers.rank:05d}-of-{peers.world_size:05d}.safetensors"
        if state.holders.count == 1:
            peers, name = _ALONE, STATE_TENSORS
        temporary = unpublished_name(checkpoint_path(directory, step))
        temporary = Path(os.fsdecode(peers.broadcast_bytes(os.fsencode(temporary))))
        try:
            with peers.raise_together():
                if peers.is_rank_zero:
                    directory.mkdir(exist_ok=True)
                    temporary.mkdir(mode=0o700)
                    write_all(temporary, state.others)
            with peers.raise_together():
                entries = {name: image.write(temporary / name, state.owned)} if image and state.owned else {}
                if entries and not peers.is_rank_zero:  # rank 0 flushes its file when it publishes all
                    fsync(temporary / name)
                self.owner.publishing(step)
            files = {file: entry for written in peers.all_gather_json(entries) for file, entry in written.items()}
            with peers.raise_together():
                if peers.is_rank_zero:
                    publish_checkpoint(temporary, step, self.keep, described=files, check=self.owner.check)
        finally:
            if peers.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)  # there is none if the checkpoint has been published
