"""Copies a state to host memory, where the training does not change it. Runs on every rank."""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import TensorSpec
from torch import Tensor

from hpc.run.rundir import STATE_VALUES
from training.checkpoint.sharded import ShardLayout
from training.checkpoint.state import LOSS
from training.runtime.compat import copy_each
from training.runtime.rank_device import DeviceCopy

_BLOCK_BYTES, _ALIGNMENT = 2**26, 64


@dataclass
class HostMemory:
    """Memory for a copy of a state. Each copy reuses it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(init=False)
    """What safetensors needs to write the tensors. To make it for each file takes longer than to write a small one."""
    is_new: bool = field(default=True, init=False)
    """Whether it was never used. The first copy takes longer, because the kernel has to provide the memory."""

    def __post_init__(self) -> None:
        """Describe the tensors."""
        self.specs = {name: spec_of(tensor, tensor) for name, tensor in self.tensors.items()}

    def extended(self, like: Mapping[str, Tensor]) -> "HostMemory":
        """Allocate memory for those of the given tensors that it lacks, and return itself."""
        new = HostMemory(host_memory({name: tensor for name, tensor in like.items() if name not in self.tensors}))
        self.tensors |= new.tensors
        self.specs |= new.specs
        return self


def host_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return host memory for tensors of these shapes and dtypes, by name. It is pinned if they are on a GPU.

    The memory is allocated in few blocks, since torch rounds each piece of pinned memory up to a power of two.
    """
    blocks: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size + _aligned(tensor) > _BLOCK_BYTES:
            blocks.append([])
            size = 0
        blocks[-1].append(name)
        size += _aligned(tensor)
    memory: dict[str, Tensor] = {}
    for names in filter(None, blocks):
        sizes = [_aligned(tensors[name]) for name in names]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=any(tensors[name].is_cuda for name in names))
        for name, part in zip(names, torch.split(block, sizes), strict=True):
            memory[name] = shaped(part, tensors[name])
    return memory


def _aligned(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block, rounded up so that the next one may have any dtype."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return the first bytes of `memory` as a contiguous tensor of the shape and dtype of another one."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def spec_of(tensor: Tensor, content: Tensor) -> TensorSpec:
    """Return what safetensors needs to write a tensor of this shape and dtype, whose bytes are at `content`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=content.data_ptr(), data_len=tensor.nbytes)


class HostCopy:
    """A copy of a state in host memory."""

    def __init__(self) -> None:
        self.memory, self.layout, self.values = HostMemory(), ShardLayout(), dict[str, Any]()
        self._captured: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._device_copy: DeviceCopy | None = None

    def start(
        self, tensors: Mapping[str, Tensor], values: dict[str, Any], layout: ShardLayout, memory: HostMemory
    ) -> DeviceCopy | None:
        """Start to copy a captured state to `memory`. The previous copy must have been written.

        Returns the copy for which a GPU must wait before it changes the state; None on a CPU, where the copy is done.
        """
        # Keep references until the copy is complete, so that the memory of the captured tensors is not reused before.
        self._captured, self.memory, self.layout, self.values = list(tensors.values()), memory, layout, values
        if tensors[LOSS].is_cuda:
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
            self._stream.wait_stream(torch.cuda.current_stream())
        hosts = [memory.tensors[name] for name in tensors]
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            copy_each(hosts, self._captured, non_blocking=True)
        memory.is_new = False
        self._device_copy = DeviceCopy(self._stream) if self._stream else None
        return self._device_copy

    def wait(self) -> None:
        """Wait until the copy is complete. Runs in the writer's thread."""
        if self._device_copy:
            self._device_copy.wait()
        self._captured = []

    @property
    def is_finite(self) -> bool:
        """Whether the loss in the copy is finite. The copy must be complete."""
        return math.isfinite(float(self.memory.tensors[LOSS]))

    def write(self, directory: Path, *, replicated: bool = True) -> None:
        """Write the files of the complete copy: this rank's shards, and if `replicated` all other tensors and values.

        Raises:
            OSError: a file cannot be written, such as on a full disk.
        """
        self.layout.write(self.memory.specs, directory, replicated=replicated)
        if replicated:
            self.write_values(directory)

    def write_values(self, directory: Path) -> None:
        """Write the file of the values that are no tensors. Raises OSError if it cannot be written."""
        # Without an indent, which json.dumps makes in Python, this takes a fifth of the time.
        (directory / STATE_VALUES).write_text(json.dumps(self.values))
