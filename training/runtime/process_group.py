"""Connects the ranks; owns their collectives and the errors that all ranks raise. Runs on every rank."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # exported, but not in __all__
from torch.distributed.rendezvous import rendezvous
from torchrelay.rank_exchange import RankGroup
from torchrelay.saving.tensor_files import dtype_named

from hpc.base.errors import UserError
from hpc.base.kernel import resident_memory_bytes
from training.runtime.rank_device import TIMEOUT, device_of_the_node, find_device
from training.runtime.run_context import RankInfo

_WATCHED_TIMEOUT = timedelta(days=1)
# Pauses between two tries to reach rank 0's store. They grow, so that many ranks do not flood it.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.25


class SharedError(UserError):
    """A user's mistake that every rank raises and only rank 0 prints."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup(RankGroup):
    """This rank's device, and its connections to all ranks."""

    rank_info: RankInfo
    device: torch.device
    connected_at: float
    """time.monotonic() when all ranks had connected."""
    cores: int
    """Number of CPU cores for this rank: its share of the node's cores."""
    timeout: timedelta = TIMEOUT
    """Maximum duration of each wait for other ranks."""

    @property
    def description(self) -> str:
        """Ranks and kind of device, such as `2 ranks on CPU`."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} on {'GPU' if self.device.type == 'cuda' else 'CPU'}"

    @property
    def used_memory(self) -> int:
        """On a GPU, the peak bytes that torch has reserved; on a CPU, the resident bytes of this process now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return resident_memory_bytes()

    def wait_for_device(self) -> None:
        """Wait until this rank's device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, computed on the CPU."""
        total = values.detach().to("cpu", copy=True)
        distributed.all_reduce(total, group=self.control)
        return total

    def all_reduce_on_device(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, computed on the device. The host does not wait for it."""
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield rank 0's names and tensors. The `tensors` of other ranks are ignored.

        All ranks must iterate to the end. A tensor keeps up to 64 MB of others in memory: to keep a tensor, copy it.
        """
        described = {name: (str(value.dtype), list(value.shape)) for name, value in tensors.items()}
        text = self.broadcast_bytes(json.dumps(described).encode())
        shapes = {name: (dtype_named(kind), tuple(shape)) for name, (kind, shape) in json.loads(text).items()}
        yield from self.broadcast_each(shapes, tensors.__getitem__, 0)

    def new_group(self) -> "ProcessGroup":
        """Return a copy with a control group of its own, for another thread. All ranks must call this."""
        return replace(self, control=_control_group(self.timeout))

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Make all ranks raise if the `with` block raises UserError on any rank. All ranks must enter the block.

        Raises SharedError with the message of the first rank that failed.
        """
        problem = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        problems = {rank: text for rank, text in enumerate(self.all_gather_json(problem)) if text is not None}
        if problems:
            rank, text = next(iter(problems.items()))
            alone = len(problems) < self.world_size
            raise SharedError(f"rank {rank}: {text}" if alone else text)


@device_of_the_node()
def connect(rank_info: RankInfo, *, watched: bool = False) -> ProcessGroup:
    """Connect to the other ranks: by NCCL with a GPU per rank, by gloo without GPUs.

    gloo binds to the address to which the host name resolves. Other nodes must reach it, so it must not be a loopback
    address. If `watched`, a node agent ends ranks that hang, so waits have a timeout of a day instead of ten minutes.

    Raises:
        BadNodeError: this node has fewer GPUs than ranks, or torch cannot use them.
        UserError: a node with several ranks has MIG instances, or each of several nodes has fewer GPUs than ranks.
        TorchrelayError: another node has too few GPUs.
    """
    timeout = _WATCHED_TIMEOUT if watched else TIMEOUT
    # A single rank without torchrun has a store in its own memory.
    store: Store = HashStore()
    if "MASTER_ADDR" in os.environ:
        if not rank_info.is_rank_zero:
            _wait_for_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    device = find_device(rank_info, store)
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    cores = len(os.sched_getaffinity(0)) // rank_info.local_world_size
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=timeout, device_id=gpu,
    )  # fmt: skip
    control = _control_group(timeout)
    return ProcessGroup(
        rank=rank_info.rank, local_rank=rank_info.local_rank, world_size=rank_info.world_size, control=control,
        rank_info=rank_info, device=device, connected_at=time.monotonic(), cores=cores, timeout=timeout,
    )  # fmt: skip


def _wait_for_store(address: str, port: int) -> None:
    """Wait until rank 0 listens, with pauses shorter than the 0.4 s and more of torch's client (seen in torch 2.15)."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    pause = _FIRST_PAUSE_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.2)
        except OSError:
            return  # torch's client reports other errors
        else:
            return


def _control_group(timeout: timedelta) -> distributed.ProcessGroup:
    group = distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, distributed.ProcessGroup)  # noqa: S101  # only ranks that are not members get a number
    return group


def disconnect() -> None:
    """Destroy the process group."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
