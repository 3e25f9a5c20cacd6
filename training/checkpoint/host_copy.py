"""Captures a state, and copies it from the device to the host's memory while the training goes on. Runs on every rank.

A copy from a GPU runs on a stream of its own, up to the next change of what is copied: there the GPU waits for the copy
(`TrainState.wait_for_copies`), and the host does not.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint.sharded import ShardLayout, local_shards
from training.checkpoint.state import LOSS, TrainState
from training.checkpoint.storage import STATE_VALUES
from training.runtime.process_group import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class CapturedState:
    """A state at one step: the same on every rank, or this rank's shards of it."""

    tensors: Mapping[str, Tensor]
    """By name, on the device. They are the training's own, unless the forward pass changes them."""
    values: Mapping[str, Any]
    """All else, as JSON holds it."""
    layout: ShardLayout

    @property
    def size_bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def capture(state: TrainState, group: ProcessGroup) -> CapturedState:
    """The state as it is. All ranks must call this; on a GPU the host does not wait for it.

    Between steps batch statistics differ by rank. The next forward pass begins with rank 0's, and changes them: so the
    captured ones are copies of rank 0's.

    Raises:
        SharedError: there are more unreadable images than are allowed.
    """
    tensors, values = state.state_dict()
    tensors |= group.broadcast_copies({name: tensors[name] for name in state.batch_statistics})
    layout = ShardLayout()
    if state.sharded:
        tensors, layout = local_shards(tensors, group)
    return CapturedState(tensors=tensors, values=values, layout=layout)


class HostCopy:
    """A copy of a state in the host's memory, which the training does not touch. Each copy reuses the memory."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._captured: CapturedState | None = None
        self._layout = ShardLayout()
        self._values: Mapping[str, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_allocated(self) -> bool:
        """Whether there has been a copy, so that the next one need not allocate memory."""
        return bool(self._tensors)

    def start(self, captured: CapturedState) -> torch.cuda.Event | None:
        """Start to copy a state. The copy before must have been written.

        Returns:
            What the device must wait for before it changes the state; None: the copy is complete.
        """
        for name, value in captured.tensors.items():
            if name not in self._tensors:
                # A GPU copies to pinned memory at full speed and without the host.
                self._tensors[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        # Referenced until the copy is complete, or the device could reuse the memory of the captured tensors.
        self._captured, self._layout, self._values = captured, captured.layout, captured.values
        if not captured.tensors[LOSS].is_cuda:
            self._copy(captured)
            return None
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(captured)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        copied.record(self._stream)
        return copied

    def _copy(self, captured: CapturedState) -> None:
        hosts = [self._tensors[name] for name in captured.tensors]
        with torch.no_grad():
            torch._foreach_copy_(hosts, list(captured.tensors.values()), non_blocking=True)

    def wait(self) -> None:
        """Wait until the copy is complete. Runs in the thread that writes."""
        if self._stream:
            self._stream.synchronize()
        self._captured = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss in the copy, which is complete, is finite."""
        return math.isfinite(float(self._tensors[LOSS]))

    def write(self, directory: Path, *, replicated: bool = True) -> None:
        """Write the files of the copy, which is complete, into a directory.

        Of a sharded state, `replicated` says whether to write what all ranks hold too.

        Raises:
            OSError: the disk is full, for example.
        """
        tensors = self._layout.select(self._tensors, replicated=replicated)
        try:
            save_file(tensors, directory / self._layout.file, self._layout.header(tensors))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if replicated:
            (directory / STATE_VALUES).write_text(json.dumps(self._values, indent=2))
