"""A state on its way from the device to a file, without making the training wait. Runs on every rank.

A copy from a GPU goes over a stream of its own. The training goes on meanwhile, up to the next change of what is being
copied: there the GPU waits for the copy, and the host does not.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint.sharded_state import ShardLayout, own_part
from training.checkpoint.state import TrainState
from training.checkpoint.storage import NUMBERS
from training.engine.corrupt_images import CorruptImages
from training.engine.early_stopping import EarlyStopping
from training.engine.loss_meter import LossMeter
from training.runtime.process_group import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A state at one step, the same on every rank, or the rank's part of it."""

    tensors: dict[str, Tensor]
    """By name, on the device: those of the training itself where only the optimizer changes them."""
    layout: ShardLayout
    loss: Tensor
    """The sum of all ranks' losses since the last line of metrics, on the device."""
    numbers: dict[str, Any]
    """All but that sum."""

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class Capturer:
    """Brings together what a state consists of."""

    state: TrainState
    loss_meter: LossMeter
    early_stopping: EarlyStopping
    corrupt: CorruptImages
    group: ProcessGroup
    attempt: int

    def capture(self) -> Captured:
        """The state as it is. All ranks must call this; on a GPU no host waits for it.

        Between steps batch statistics are each rank's own, and the next forward pass begins with rank 0's and changes
        them: these are copies of rank 0's.

        Raises:
            SharedError: more images cannot be read than are allowed.
        """
        self.corrupt.share()
        tensors = self.state.tensors()
        statistics = self.group.broadcast_copies({name: tensors[name] for name in self.state.buffers()})
        accounting = {
            "train_seconds": self.loss_meter.train_seconds,
            "spent_seconds": self.early_stopping.spent_seconds,
        }
        counted = {"window": {"images": self.loss_meter.images}, "accounting": accounting, "attempt": self.attempt}
        loss = self.group.all_reduce_on_device(self.loss_meter.loss)
        tensors, layout = tensors | statistics, ShardLayout()
        if self.state.sharded:
            tensors, layout = own_part(tensors, self.group)
        return Captured(tensors=tensors, layout=layout, loss=loss, numbers=self.state.numbers() | counted)


class HostCopy:
    """A copy of a state in the host's memory, which the training does not touch. The memory is used again and again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, pin_memory=torch.cuda.is_available())
        self._captured: Captured | None = None
        self._layout = ShardLayout()
        self._numbers: dict[str, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for a copy by now."""
        return bool(self._tensors)

    def take(self, captured: Captured) -> torch.cuda.Event | None:
        """Begin to copy a state, when the copy before has been written.

        Returns:
            What the device must wait for before it changes the state; None: the copy is there.
        """
        for name, value in captured.tensors.items():
            if name not in self._tensors:
                # Pinned memory, so that a GPU copies at full speed and without the host.
                self._tensors[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        # Held until the copy is there: the device must not use its memory for anything else before.
        self._captured, self._layout, self._numbers = captured, captured.layout, captured.numbers
        if not captured.loss.is_cuda:
            self._copy(captured)
            return None
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(captured)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        copied.record(self._stream)
        return copied

    def _copy(self, captured: Captured) -> None:
        with torch.no_grad():
            hosts = [self._tensors[name] for name in captured.tensors]
            torch._foreach_copy_([*hosts, self._loss], [*captured.tensors.values(), captured.loss], non_blocking=True)

    def finish(self) -> float:
        """Wait until the copy is there, and return the sum of the losses: if it is not finite, the state is of no use.

        Runs in the thread that writes.
        """
        if self._stream:
            self._stream.synchronize()
        self._captured = None
        self._numbers["window"]["loss"] = float(self._loss)
        return float(self._loss)

    def write(self, directory: Path, *, shared: bool = True) -> None:
        """Write the files of the copy, which is there, into a directory.

        Args:
            directory: where to.
            shared: whether what all ranks have of a sharded state is written too, its numbers among it.

        Raises:
            OSError: the disk is full, for example.
        """
        tensors = self._layout.chosen(self._tensors, shared=shared)
        try:
            save_file(tensors, directory / self._layout.file, self._layout.header(tensors))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if shared:
            (directory / NUMBERS).write_text(json.dumps(self._numbers, indent=2))
