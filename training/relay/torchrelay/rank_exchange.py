"""Connects the ranks through their CPUs, and sends bytes between them. Runs on every rank.

Only the functions import torch: when a rank calls them, its script has imported torch already.
"""

import atexit
from typing import TYPE_CHECKING, Any

from .stop_consensus import StopConsensus
from .this_rank import THIS_RANK, check_version

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather_bytes(data: bytes, group: "ProcessGroup | None") -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks. All ranks must call this. With one rank, `group` is None.

    This replaces torch's all_gather_object, which unpickles what it receives. The connections between ranks are not
    authenticated, so any process that poses as a rank could run code on all ranks.
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
    # numpy is not used: the environment of a user's script may lack it.
    received = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
    distributed.all_gather(received, torch.frombuffer(own, dtype=torch.uint8), group=group)
    return [bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast_bytes(data: bytes | None, source: int, group: "ProcessGroup | None") -> bytes:
    """Return rank `source`'s `data` on every rank. The `data` of other ranks is ignored. All ranks must call this."""
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
    """Connects a script's rank to the others."""

    def __init__(self) -> None:
        self.group: Any = None
        """The gloo process group of all ranks; None if this is the only rank."""
        self.stopping: tuple[str, float] | None = None
        """Name of the signal that stops all ranks, and time.monotonic() when this rank got it or agreed, or None."""
        self._consensus: StopConsensus | None = None

    def connect(self, call: str) -> StopConsensus:
        """Connect once, and return the consensus.

        Raises:
            RuntimeError: several ranks have no process group.
            OtherVersionError: this package is not the run's.
        """
        from torch import distributed

        if self._consensus is None:
            check_version()
            if THIS_RANK.world_size > 1:
                if not distributed.is_initialized():
                    fix = "call it after torch.distributed.init_process_group()"
                    raise RuntimeError(f"{call} needs the other ranks: {fix}")
                self.group = distributed.new_group(backend="gloo")
            self._consensus = StopConsensus(self.group)
        return self._consensus

    def close(self) -> None:
        """Release the process group before Python shuts down: the group's threads would abort the process then."""
        self._consensus = self.group = None


ranks = Ranks()
atexit.register(ranks.close)
