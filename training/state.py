"""Everything that must survive a cut, in one place. Runs on every rank.

Randomness is counted (`training.counted`), so there are no generators to save: the whole state of the data is
`epoch` and `samples_seen`.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpc.errors import UserError
from training.config import TrainConfig, flag
from training.data import Data

STATE_FILES = _TENSORS, _PROGRESS, _IDENTITY = "state.pt", "progress.json", "identity.json"


@dataclass(kw_only=True)
class Progress:
    """How far a run is: plain numbers."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done."""
    samples_seen: int = 0
    """Images of the current epoch that were used."""
    evaluated_epochs: int = 0
    """Epochs after which the model was validated."""
    val_loss: float | None = None
    """Of the last validation."""
    val_accuracy: float | None = None
    best_accuracy: float | None = None
    """The highest in validation."""
    window_loss: float = 0.0
    """Sum of the losses of all images since the last line of metrics."""
    window_images: int = 0


# Fields of the config that the saved state depends on: another value would make it another run.
_IDENTIFYING = (
    "model",
    "batch_size",
    "seed",
    "optimizer",
    "image_size",
    "val_fraction",
)


def identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What a state belongs to. Nothing of it depends on where the data lie."""
    counts = {"train_samples": len(data.train), "classes": len(data.classes), "fingerprint": data.fingerprint}
    return {name: getattr(config, name) for name in _IDENTIFYING} | counts


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: str) -> None:
    """Make sure that a state belongs to this run.

    Raises:
        UserError: it was made with other data, or a flag has changed that it depends on.
    """
    for name in _IDENTIFYING:
        if saved.get(name) != current[name]:
            raise UserError(
                f"{flag(name)} is {current[name]}, but {checkpoint} was made with {saved.get(name)}: "
                f"use that, or another --run-dir"
            )
    for name in ("train_samples", "classes", "fingerprint"):
        if saved.get(name) != current[name]:
            raise UserError(
                f"--data has {name.replace('_', ' ')} {current[name]}, but {checkpoint} was made with "
                f"{saved.get(name)}: use the same data, or another --run-dir"
            )


@dataclass(kw_only=True)
class TrainState:
    """The model, the optimizer and the progress, to be saved and restored together."""

    model: nn.Module
    optimizer: Optimizer
    progress: Progress
    identity: dict[str, Any]

    def to_files(self) -> dict[str, bytes]:
        """The state as files, independent of what the training does next."""
        return {
            _TENSORS: to_bytes({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}),
            _PROGRESS: json.dumps(asdict(self.progress), indent=2).encode(),
            _IDENTITY: json.dumps(self.identity, indent=2).encode(),
        }

    def restore(self, files: Mapping[str, bytes], checkpoint: str) -> None:
        """Become the state that was saved.

        Raises:
            UserError: it does not belong to this run.
        """
        check_identity(json.loads(files[_IDENTITY]), self.identity, checkpoint)
        tensors = from_bytes(files[_TENSORS])
        self.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        for name, value in json.loads(files[_PROGRESS]).items():
            if name in {field.name for field in fields(Progress)}:
                setattr(self.progress, name, value)


def to_bytes(value: Any) -> bytes:
    """Tensors in dictionaries and lists, as torch stores them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` stored, on the CPU. Runs no code from the file."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
