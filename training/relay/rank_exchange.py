"""Owns what the ranks tell each other on the CPU: maxima of numbers, and bytes. Runs on every rank.

torch is imported in the functions that a rank calls, when the script has imported it already.
"""

import atexit
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .this_rank import THIS_RANK

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class PendingMaximum:
    """The maximum of each of some numbers over all ranks, which they find on the CPU while they go on training."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        self._group = group
        self._pending: tuple[torch.Tensor, Any] | None = None

    def start(self, numbers: Iterable[int]) -> None:
        """Send this rank's numbers. All ranks must call this; the one before must have been waited for."""
        import torch
        from torch import distributed

        maximum = torch.tensor(tuple(numbers))
        work = distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = maximum, work

    def wait(self) -> list[int]:
        """Return the maximum of what the ranks have sent; empty if they have sent nothing since the last call."""
        if self._pending is None:
            return []
        maximum, work = self._pending
        self._pending = None
        work.wait()
        found: list[int] = maximum.tolist()
        return found


def all_gather_bytes(data: bytes, group: "ProcessGroup | None") -> list[bytes]:
    """Return the bytes of every rank, by rank. All ranks must call this; without a group, this is the only one.

    torch's all_gather_object unpickles what it receives: a process that poses as a rank would run code on all. The
    connections between ranks are not authenticated.
    """
    import torch
    from torch import distributed

    if group is None:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(1, *(int(size) for size in sizes))
    own, *texts = (bytearray(longest) for _ in range(1 + len(sizes)))
    own[: len(data)] = data
    # Not through numpy, which the environment of a user's script may lack.
    received = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
    distributed.all_gather(received, torch.frombuffer(own, dtype=torch.uint8), group=group)
    return [bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast_bytes(data: bytes | None, source: int, group: "ProcessGroup | None") -> bytes:
    """Return the bytes of rank `source` on every rank; the argument of other ranks is ignored."""
    import torch
    from torch import distributed

    if group is None:
        return data or b""
    size = torch.tensor([len(data) if data is not None else 0])
    distributed.broadcast(size, source, group=group)
    mine = bytearray(data) if distributed.get_rank() == source and data is not None else bytearray(int(size))
    if mine:
        distributed.broadcast(torch.frombuffer(mine, dtype=torch.uint8), source, group=group)
    return bytes(mine)


class Ranks:
    """Has all ranks do at the same call what one of them wants."""

    def __init__(self) -> None:
        self.group: Any = None
        """The ranks' process group on the CPUs; None: this is the only rank."""
        self.stopping: tuple[int, float] | None = None
        """The signal for which all ranks stop, and time.monotonic() when it arrived, or was agreed on."""
        self._maximum: PendingMaximum | None = None

    def connect(self, call: str) -> None:
        """Make the process group, once. Raises RuntimeError if the script has none yet."""
        from torch import distributed

        if THIS_RANK.world_size == 1 or self.group is not None:
            return
        if not distributed.is_initialized():
            raise RuntimeError(f"{call} needs the other ranks: call it after torch.distributed.init_process_group()")
        self.group = distributed.new_group(backend="gloo")
        self._maximum = PendingMaximum(self.group)

    def agree(self, wanted: list[int]) -> list[int]:
        """Return the maximum of each number that the ranks sent at the call before: no rank waits for another."""
        if self._maximum is None:
            return wanted
        agreed = self._maximum.wait() or [0] * len(wanted)
        # What was agreed on happens now: it must not happen twice.
        self._maximum.start(0 if done else want for done, want in zip(agreed, wanted, strict=True))
        return agreed

    def settle(self) -> None:
        """End the exchange that is under way."""
        if self._maximum:
            self._maximum.wait()

    def close(self) -> None:
        """Let go of the process group. At exit, before Python takes itself apart: its threads would abort then."""
        self._maximum = self.group = None


ranks = Ranks()
atexit.register(ranks.close)
