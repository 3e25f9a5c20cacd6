"""Connects the ranks through their CPUs, and sends bytes between them. Runs on every rank.

Only the functions import torch: when a rank calls them, its script has imported torch already.
"""

import atexit
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .progress_files import progress_files
from .stop_consensus import StepFlags, StopConsensus, StopRequested
from .stop_signals import signals
from .this_rank import THIS_RANK, check_version

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


# Large enough for the full bandwidth, and small compared with a state that takes long to send.
_BUCKET_BYTES = 2**26


class OtherRankError(RuntimeError):
    """Another rank has raised an error, which the text names."""


def reason_of(error: Exception) -> str:
    """Return the text of an error; some have none."""
    return str(error) or repr(error)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """This rank, and its connections to all ranks. All ranks must call the same methods in the same order."""

    rank: int
    local_rank: int
    world_size: int
    control: "ProcessGroup | None"
    """Gloo group of all ranks for exchanges on the CPU, which do not make the device wait; None for a single rank."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def new_group(self) -> "RankGroup":
        """Return a copy with a control group of its own, for another thread."""
        from torch import distributed

        group: Any = self.control and distributed.new_group(backend="gloo")
        return replace(self, control=group)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of ranks.

        This replaces torch's all_gather_object, which unpickles what it receives. The connections between ranks are not
        authenticated, so any process that poses as a rank could run code on all ranks.
        """
        import torch
        from torch import distributed

        if self.control is None:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([len(data)]), group=self.control)
        longest = max(1, *(int(size) for size in sizes))
        own, *texts = (bytearray(longest) for _ in range(1 + len(sizes)))
        own[: len(data)] = data
        # numpy is not used: the environment of a user's script may lack it.
        received = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
        distributed.all_gather(received, torch.frombuffer(own, dtype=torch.uint8), group=self.control)
        return [bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Values are small and fit for JSON; tuples become lists."""
        return [json.loads(text) for text in self.all_gather_bytes(json.dumps(value).encode())]

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Make all ranks raise if the block raises on any rank: OtherRankError on the ranks without an error."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # it is raised below, when the other ranks know
            failure = error
        problems = self.all_gather_json(reason_of(failure) if failure else "")
        if failure:
            raise failure
        raise_for_others(problems)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Return rank `source`'s `data` on every rank. The `data` of other ranks is ignored."""
        import torch
        from torch import distributed

        if self.control is None:
            return data or b""
        size = torch.tensor([len(data) if data is not None else 0])
        distributed.broadcast(size, source, group=self.control)
        mine = bytearray(data) if self.rank == source and data is not None else bytearray(int(size))
        if mine:
            distributed.broadcast(torch.frombuffer(mine, dtype=torch.uint8), source, group=self.control)
        return bytes(mine)

    def broadcast_copies(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Return copies of rank 0's tensors on every rank. The host does not wait for a GPU.

        There is one broadcast for each dtype and device. Names, shapes, dtypes and kinds of devices must be the same on
        all ranks.
        """
        import torch
        from torch import distributed

        copies: dict[str, Tensor] = {}
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors.values()):
            alike = {name: tensor for name, tensor in tensors.items() if (tensor.dtype, tensor.device) == kind}
            flat = torch.cat([tensor.detach().flatten() for tensor in alike.values()])
            if self.control is not None:
                # Send bytes, because a backend may not support the dtype.
                distributed.broadcast(flat.view(torch.uint8), 0, group=None if flat.is_cuda else self.control)
            parts = torch.split(flat, [tensor.numel() for tensor in alike.values()])
            copies |= {name: part.view(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
        return copies

    def broadcast_each(
        self, shapes: "Mapping[str, tuple[torch.dtype, tuple[int, ...]]]", read: "Callable[[str], Tensor]", source: int
    ) -> "Iterator[tuple[str, Tensor]]":
        """Yield rank `source`'s tensors by name on every rank. All ranks must iterate to the end.

        All ranks know the dtypes and shapes; only rank `source` calls `read`. Tensors are sent in buckets of 64 MB, or
        of one larger tensor. A tensor keeps its whole bucket in memory: to keep a tensor, copy it.

        Raises:
            OSError, ValueError: on rank `source`, from `read`, when all has been sent.
        """
        import torch
        from torch import distributed

        if self.control is None:
            yield from ((name, read(name)) for name in shapes)
            return
        on_gpu = torch.cuda.is_initialized() and "nccl" in distributed.get_backend()  # type: ignore[no-untyped-call]
        device, group = ("cuda", None) if on_gpu else ("cpu", self.control)
        problem: Exception | None = None
        for bucket in _buckets(shapes):
            kind = shapes[bucket[0]][0]
            sizes = [math.prod(shapes[name][1]) for name in bucket]
            flat = torch.empty(sum(sizes), dtype=kind, device=device)
            parts = [part.view(shapes[name][1]) for name, part in zip(bucket, torch.split(flat, sizes), strict=True)]
            for name, part in zip(bucket, parts, strict=True) if self.rank == source else ():
                try:
                    part.copy_(read(name))
                except (OSError, ValueError) as error:
                    problem = error
            distributed.broadcast(flat.view(torch.uint8), source, group=group)
            yield from zip(bucket, parts, strict=True)
        if problem:
            raise problem


def raise_for_others(problems: Iterable[str]) -> None:
    """Raise OtherRankError if a rank has a problem. `problems` are texts of all ranks, empty for no problem."""
    for rank, text in enumerate(problems):
        if text:
            raise OtherRankError(f"rank {rank}: {text}")


def _buckets(shapes: "Mapping[str, tuple[torch.dtype, tuple[int, ...]]]") -> Iterator[list[str]]:
    """Yield the names of tensors in buckets. Each bucket has one dtype, and at most 64 MB or a single tensor."""
    bucket, size_bytes = list[str](), 0
    for name, (kind, shape) in sorted(shapes.items(), key=lambda item: str(item[1][0])):
        more = kind.itemsize * math.prod(shape)
        if bucket and (size_bytes + more > _BUCKET_BYTES or kind != shapes[bucket[0]][0]):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(name)
        size_bytes += more
    if bucket:
        yield bucket


class Ranks:
    """Connects a script's rank to the others."""

    def __init__(self) -> None:
        self.stopping: tuple[str, float] | None = None
        """Name of the signal that stops all ranks, and time.monotonic() when this rank got it or agreed, or None."""
        self._control: Any = None
        self._consensus: StopConsensus | None = None

    def connect(self, call: str) -> StopConsensus:
        """Connect once, and return the consensus. Raises RuntimeError if several ranks have no process group."""
        from torch import distributed

        if self._consensus is None:
            check_version()
            if THIS_RANK.world_size > 1:
                if not distributed.is_initialized():
                    fix = "call it after torch.distributed.init_process_group()"
                    raise RuntimeError(f"{call} needs the other ranks: {fix}")
                self._control = distributed.new_group(backend="gloo")
            self._consensus = StopConsensus(self._control)
        return self._consensus

    @property
    def peers(self) -> RankGroup:
        """This rank and its connections, once it is connected."""
        return RankGroup(
            rank=THIS_RANK.rank, local_rank=THIS_RANK.local_rank, world_size=THIS_RANK.world_size, control=self._control
        )

    def agree(self, call: str, *, save: int = 0, snapshot: int = 0) -> StepFlags | None:
        """Exchange flags, and return the agreed ones; None once the ranks have agreed to stop. All ranks call this."""
        if self.stopping is None:
            consensus = self.connect(call)
            try:
                return consensus.exchange(StepFlags(signal=signals.received(), save=save, snapshot=snapshot))
            except StopRequested as request:
                self.stopping = request.name, signals.received_at() or time.monotonic()
        return None

    def record_stop(self, step: int) -> None:
        """Record that the state of a step is saved, if the ranks have agreed to stop."""
        if self.stopping:
            name, requested_at = self.stopping
            seconds = round(time.monotonic() - requested_at, 3)
            progress_files.event("train_stopped", step=step, signal=name, seconds=seconds)

    def close(self) -> None:
        """Release the process group before Python shuts down: the group's threads would abort the process then."""
        self._consensus = self._control = None


ranks = Ranks()
atexit.register(ranks.close)
