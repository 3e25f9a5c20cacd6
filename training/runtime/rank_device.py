"""Finds a rank's device. If none works, tells whether the node or the user is to blame. Runs on every rank."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # exported, but not in __all__
from torchrelay.saving.state_writer import DeviceCopy

from hpc.base.environment import DEVICE
from hpc.base.errors import BadNodeError, TorchrelayError, UserError
from hpc.run.causes import is_device_failure
from training.runtime.run_context import RankInfo

# A rank that has not answered for this long is taken for dead.
TIMEOUT = timedelta(minutes=10)
# The file exists where NVIDIA's driver is loaded.
_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@contextmanager
def device_of_the_node() -> Iterator[None]:
    """Turn a RuntimeError of CUDA or the device, in the `with` block or decorated function, into BadNodeError."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip().partition("\n")[0]
        # Other errors, such as that NCCL cannot reach a node, say nothing about this node's device.
        if "cuda" not in message.lower() and not is_device_failure(message):
            raise
        raise BadNodeError(f"{platform.node()} cannot use its GPUs: {message}") from error


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, such as `NVIDIA H200`, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model, such as `XEON(R) 8592+, family 6, model 207`, or its architecture, such as `aarch64`."""
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        # A virtual machine may hide the name, but not the numbers by which libraries choose their kernels.
        return f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"
    except (OSError, KeyError):
        return platform.machine()


class HostValues:
    """Copies a tensor, float [n], from the device to the host in the background."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: DeviceCopy | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = DeviceCopy(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """Wait for the copy, not for later work of the device, and return the values. Any thread may call this."""
        if self._copied:
            self._copied.wait()
        values: list[float] = self._values.tolist()
        return values


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's random number generators of the CPU and of this rank's device.

    `torch.manual_seed` does the same, but on a CPU takes a millisecond to prepare unused devices.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def find_device(rank_info: RankInfo, store: Store) -> torch.device:
    """Return this rank's device. All ranks must call this with the same store.

    Raises:
        BadNodeError: this node has fewer GPUs than ranks, or torch cannot use GPUs that were asked for.
        UserError: this rank needs a second MIG instance, but a process sees only one; or `choose_device` raised it.
        TorchrelayError: another node has too few GPUs.
    """
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-") and rank_info.local_rank >= usable > 0:
        what = f"CUDA_VISIBLE_DEVICES is {visible}, but a process sees only one MIG instance"
        raise UserError(f"{what}: start one rank per node (--gpus-per-node 1)")
    # Without a node agent, the user names GPUs in CUDA_VISIBLE_DEVICES. A testbed names fake GPUs, and has no driver.
    named = bool(visible) and _NVIDIA_DRIVER.exists()
    problem = why_no_gpu() if not usable and (named or os.environ.get(DEVICE) == "cuda") else ""
    return choose_device(rank_info, store, usable, problem)


def why_no_gpu() -> str:
    """Return the reason why torch cannot use a GPU on this node."""
    version = f"torch {torch.__version__}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        message = str(error).strip().partition("\n")[0]
        numbered = re.search(r"Error \d+: .*", message)
        reason = numbered[0] if numbered else message.partition(". ")[0]
        return f"{version} cannot use GPUs: {reason}"
    return f"{version} sees none with CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def choose_device(rank_info: RankInfo, store: Store, usable: int, problem: str) -> torch.device:
    """Return a GPU if all ranks have one, or the CPU if no rank has one. GPUs and CPUs cannot connect to each other.

    torch can use `usable` GPUs on this node. If it cannot use a GPU that was asked for, `problem` says why.

    Raises:
        BadNodeError: this node cannot use the GPU that was asked for, or has fewer GPUs than ranks.
        UserError: each of several nodes has the same number of GPUs, which is less than its ranks.
        TorchrelayError: another rank has no GPU.
    """
    broken, able = bool(problem), rank_info.local_rank < usable
    store.add("broken", broken)
    store.add("able", able)
    store.add(f"ranks where {usable} are usable", 1)
    if store.add("seen", 1) == rank_info.world_size:
        store.set("all seen", "")
    store.wait(["all seen"], TIMEOUT)
    where = f"local rank {rank_info.local_rank} on {platform.node()}"
    # Raise this before another use of the store, which is gone once rank 0 has ended.
    if broken:
        raise BadNodeError(f"{where} cannot use the GPU that was asked for (--device cpu needs none): {problem}")
    some, lacking = store.add("able", 0) > 0, rank_info.world_size - store.add("able", 0)
    several = rank_info.world_size > rank_info.local_world_size
    if some and lacking and several and store.add(f"ranks where {usable} are usable", 0) == rank_info.world_size:
        raise UserError(
            f"{rank_info.local_world_size} ranks per node, but each node gives them {usable} GPUs: use --gpus-per-node "
            f"{usable}, or check why no more are visible (CUDA_VISIBLE_DEVICES)"
        )
    if some and not able:
        raise BadNodeError(f"{where} has no GPU: this node has {usable}, so start at most that number of ranks")
    if store.add("broken", 0) or (some and lacking):
        raise TorchrelayError(
            f"this rank passed the check, but {lacking} of the {rank_info.world_size} ranks have no GPU"
        )
    return torch.device("cuda", rank_info.local_rank) if able else torch.device("cpu")
