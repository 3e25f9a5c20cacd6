"""Binds a rank to the CPU cores near its GPU, unless that would leave it fewer cores. Runs on every rank.

Pinned memory, decoded images and the threads that start kernels are then on the NUMA node that the GPU is connected to.
torchrun's own `--numa-binding` would initialize CUDA in torchrun's process, of which our ranks are forks, and CUDA does
not survive a fork. This module has run with one GPU only (docs/gpu.md).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.runtime.run_context import RankInfo

_SYS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class CoreShare:
    """Cores of a node, and the number of ranks that share them."""

    cores: frozenset[int]
    ranks: int

    @property
    def per_rank(self) -> int:
        """Number of cores for each rank."""
        return len(self.cores) // self.ranks


def bind_to_cores(device: torch.device, rank_info: RankInfo) -> CoreShare:
    """Bind this process, and all that it starts later, to the cores of `choose_cores`, and return them."""
    allowed = frozenset(os.sched_getaffinity(0))
    ranks = rank_info.local_world_size
    # A rank that sees only its own GPU does not know which cores the other ranks use.
    sees_all = device.type == "cuda" and torch.version.cuda is not None and torch.cuda.device_count() == ranks
    share = choose_cores(allowed, [_pci_address(index) for index in range(ranks)] if sees_all else [], rank_info)
    if share.cores != allowed:
        os.sched_setaffinity(0, share.cores)
    return share


def choose_cores(allowed: frozenset[int], gpus: Sequence[str], rank_info: RankInfo, sys: Path = _SYS) -> CoreShare:
    """Return the allowed cores on the NUMA node of this rank's GPU, or all allowed cores if each rank then has more.

    Args:
        allowed: the cores that the job may use on this node.
        gpus: the PCI address of each local rank's GPU; empty if unknown.
        rank_info: this rank.
        sys: the directory in which Linux describes the machine.
    """
    everything = CoreShare(cores=allowed, ranks=rank_info.local_world_size)
    numa_nodes = [_read(sys / "bus" / "pci" / "devices" / gpu / "numa_node") for gpu in gpus]
    # On a machine with one NUMA node, the file says -1 or is missing.
    if not numa_nodes or not numa_nodes[rank_info.local_rank].isdecimal():
        return everything
    mine = numa_nodes[rank_info.local_rank]
    beside = _parse_list(_read(sys / "devices" / "system" / "node" / f"node{mine}" / "cpulist"))
    near = CoreShare(cores=allowed & beside, ranks=numa_nodes.count(mine))
    # All GPUs may be connected to one of two sockets, and the job may have most of its cores on the other.
    return near if near.per_rank >= everything.per_rank and near.cores else everything


def _pci_address(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's type lacks these three
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip() if file.exists() else ""


def _parse_list(text: str) -> frozenset[int]:
    """Parse a list of cores in Linux's form, such as `0-15,32-47`."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
