"""All ranks, and what they do together. Runs on every rank."""

import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # exported, but not in __all__
from torch.distributed.rendezvous import rendezvous

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.kernel import resident_memory_bytes
from hpc.core.outcome import EXIT_BAD_NODE
from training.runtime.rank_info import RankInfo

# A rank that waits this long for another one waits for a dead one.
_TIMEOUT = timedelta(minutes=10)
_WATCHED_TIMEOUT = timedelta(days=1)
# There is one wherever NVIDIA's driver is loaded.
_DRIVER = Path("/dev/nvidiactl")


class SharedError(UserError):
    """A user's mistake that every rank knows of: one of them tells."""


class UnfitNodeError(TorchrelayError):
    """This rank's node cannot train; another one might."""

    exit_code = EXIT_BAD_NODE


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """All ranks, seen by one of them."""

    place: RankInfo
    device: torch.device
    control: distributed.ProcessGroup
    """A group on the CPU, for talk that must not make the device wait."""
    connected_at: float
    """time.monotonic() when all ranks were."""
    timeout: timedelta = _TIMEOUT
    """How long ranks wait for each other."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.place.world_size

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.place.is_rank_zero

    @property
    def used_memory(self) -> int:
        """Bytes: the most that this rank has taken of its GPU; on a CPU, what this process has in memory now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return resident_memory_bytes()

    def wait_for_device(self) -> None:
        """Until this rank's device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on the CPU."""
        total = values.detach().to("cpu", copy=True)
        distributed.all_reduce(total, group=self.control)
        return total

    def all_reduce_on_device(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on the device, for which the host need not wait."""
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total

    def broadcast_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of rank 0's tensors (of the same names and shapes on all), on every rank's device.

        The host need not wait for them. They travel together: one message for each type.
        """
        copies: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.detach().flatten() for tensor in alike.values()])
            distributed.broadcast(flat, 0)
            parts = torch.split(flat, [tensor.numel() for tensor in alike.values()])
            copies |= {name: part.view(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
        return copies

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of the rank `source`, on every rank; the others' argument does not count."""
        size = torch.tensor([len(data) if data is not None else 0])
        distributed.broadcast(size, source, group=self.control)
        mine = bytearray(data) if self.rank == source and data is not None else bytearray(int(size))
        if mine:
            distributed.broadcast(torch.frombuffer(mine, dtype=torch.uint8), source, group=self.control)
        return bytes(mine)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value (something small), by rank."""
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self.control)
        return values

    def new_group(self) -> "ProcessGroup":
        """The same ranks with a group of their own for talk, for a thread of each. All ranks must call this."""
        return replace(self, control=_control_group(self.timeout))

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Do something that may fail on some ranks only: then it fails on all of them, with the reason of the first.

        Raises:
            SharedError: the body raised a UserError on some rank.
        """
        problem = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        problems = {rank: text for rank, text in enumerate(self.all_gather_object(problem)) if text is not None}
        if problems:
            rank, text = next(iter(problems.items()))
            alone = len(problems) < self.world_size
            raise SharedError(f"rank {rank}: {text}" if alone else text)


def connect(place: RankInfo, *, watched: bool = False) -> ProcessGroup:
    """Join the other ranks: NCCL with a GPU per rank, gloo without GPUs.

    gloo binds to the address that the host's name resolves to, the one that other nodes can reach; it must not be
    pointed at the loopback interface.

    Args:
        place: of this rank.
        watched: whether an agent ends ranks that hang. It knows better than a timeout here who still works.

    Raises:
        UnfitNodeError: this node has fewer GPUs than ranks, or cannot use them.
        TorchrelayError: another node has.
    """
    timeout = _WATCHED_TIMEOUT if watched else _TIMEOUT
    store = _meet()
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(place, store, usable, _given_gpus())
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=gpu,
    )  # fmt: skip
    control = _control_group(timeout)
    return ProcessGroup(place=place, device=device, control=control, connected_at=time.monotonic(), timeout=timeout)


def _control_group(timeout: timedelta) -> distributed.ProcessGroup:
    group = distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, distributed.ProcessGroup)  # noqa: S101  # it is a number for ranks that are not members
    return group


def _meet() -> Store:
    """Where the ranks leave word for each other: torchrun's store, or for one alone its own memory."""
    if "MASTER_ADDR" not in os.environ:
        return HashStore()
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    return store


def choose_device(place: RankInfo, store: Store, usable: int, given: str) -> torch.device:
    """This rank's GPU, or the CPU if no rank has one. Ranks with and without could not even connect.

    Args:
        place: of this rank.
        store: which all ranks share.
        usable: how many GPUs torch can use on this node.
        given: those that this node should have, if that is known: NVIDIA's driver is loaded and the job has some.

    Raises:
        UnfitNodeError: this node has fewer GPUs than ranks, or cannot use them.
        TorchrelayError: another node has.
    """
    broken, able = bool(given and not usable), place.local_rank < usable
    store.add("broken", broken)
    store.add("able", able)
    if store.add("seen", 1) == place.world_size:
        store.set("all seen", "")
    store.wait(["all seen"], _TIMEOUT)
    some, lacking = store.add("able", 0) > 0, place.world_size - store.add("able", 0)
    where = f"local rank {place.local_rank} on {platform.node()}"
    if broken:
        raise UnfitNodeError(f"{where} was given the GPUs {given}, and torch {torch.__version__} can use none of them")
    if some and not able:
        raise UnfitNodeError(f"{where} has no GPU: this node has {usable}, start no more ranks than that")
    if store.add("broken", 0) or (some and lacking):
        raise TorchrelayError(f"this rank is well, but {lacking} of the {place.world_size} ranks have no GPU")
    return torch.device("cuda", place.local_rank) if able else torch.device("cpu")


def _given_gpus() -> str:
    """The GPUs that this node should have. A testbed's are given to its jobs too, but have no driver."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "") if _DRIVER.exists() else ""


def disconnect() -> None:
    """Leave the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
