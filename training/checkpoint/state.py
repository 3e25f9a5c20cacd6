"""Owns the state of a training: everything that must survive an interruption. Runs on every rank.

Each part registers with TrainState under a name, and has `state_dict` and `load_state_dict`. `torchrelay.saving` saves
and restores them. Random numbers are computed from counters (`training.runtime.counter_rng`), so no generator is saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torchrelay.saving.objects import Objects, Saveable
from torchrelay.saving.state_writer import DeviceCopy

from hpc.base.errors import UserError
from hpc.base.text import flag
from training.config.changes import IDENTIFYING
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.models.ema import Ema
from training.runtime.compat import scaler_tensors
from training.runtime.train_progress import Progress

# Name of the loss in a state. If the loss is not finite, the training has diverged, and the state is not written.
LOSS = "loss_meter/loss"


_Part = TypeVar("_Part", bound=Saveable)


@dataclass(kw_only=True)
class TrainState:
    """The parts of a training's state, and the copies of the state that the GPU still makes."""

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: Ema | None
    identity: dict[str, Any]
    """Settings and data on which the state depends. A saved state can be restored only if they are equal."""
    progress: Progress = field(default_factory=Progress)
    _parts: dict[str, Saveable] = field(default_factory=dict, init=False)
    copies: list[DeviceCopy] = field(default_factory=list, init=False)
    """Unfinished copies from the GPU to the host, for which `wait_for_copies` waits."""

    def __post_init__(self) -> None:
        """Register the parts that every training has."""
        self.register("model", self.model)
        if self.ema:
            self.register("ema", self.ema.model)
        self.register("optimizer", _OptimizerState(self.optimizer))
        self.register("scaler", _ScalerState(self.scaler))
        self.register("progress", self.progress)

    def register(self, name: str, part: _Part) -> _Part:
        """Add a part that is saved and restored, and return it.

        The part's state dict maps names to tensors, which the training may go on changing, or to JSON values. All ranks
        call its `state_dict` at the same step, so `state_dict` may communicate.
        """
        self._parts[name] = part
        return part

    @property
    def objects(self) -> Objects:
        """The parts, for the library that saves and restores them."""
        return Objects(shared=self._parts)

    def check_compatible(self, values: Mapping[str, Any], checkpoint: str) -> None:
        """Raise UserError if a saved state was made with other data or flags, or by another version."""
        saved = values.get("identity", {})
        if missing := sorted((self._parts.keys() ^ values["objects"].keys()) | (self.identity.keys() - saved.keys())):
            raise UserError(
                f"{checkpoint} lacks {', '.join(missing)}: end the run with the version that began it, "
                "or use another --run-dir"
            )
        for name, value in self.identity.items():
            if saved.get(name) != value:
                before = f"{checkpoint} was made with {saved.get(name)}"
                if name in IDENTIFYING:
                    raise UserError(f"{flag(name)} is {value}, but {before}: use that, or another --run-dir")
                label = name.replace("_", " ")
                raise UserError(f"--data has {label} {value}, but {before}: use the same data, or another --run-dir")

    def wait_for_copies(self) -> None:
        """Make the GPU finish its copies of the state before it changes the state. The host does not wait."""
        while self.copies:
            self.copies.pop().make_device_wait()


class _ScalerState:
    """Saves the loss scale as tensors on the device, since GradScaler's own `state_dict` waits for the device.

    Without `--amp fp16`, the state is empty.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler = self._scaler
        if not scaler.is_enabled():
            return {}
        # Before its first step, the scaler has no tensors yet.
        scale, tracker = scaler_tensors(scaler)
        if scale is None or tracker is None:
            plain = scaler.state_dict()  # what was restored, if the state is saved again before the next step
            tracker = torch.tensor(plain["_growth_tracker"], dtype=torch.int32)
            return {"scale": torch.tensor(plain["scale"]), "growth_tracker": tracker}
        return {"scale": scale, "growth_tracker": tracker}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if not state_dict:
            return  # of a training without --amp fp16
        restored = {"scale": float(state_dict["scale"]), "_growth_tracker": int(state_dict["growth_tracker"])}
        self._scaler.load_state_dict(self._scaler.state_dict() | restored)


class _OptimizerState:
    """Restores an optimizer's tensors and its last learning rates: its other settings come from the flags."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        # No step reads this learning rate: each sets its own. But a state that is saved again before the next step, or
        # after the last one, must be the restored one, bit by bit.
        present = self.optimizer.state_dict()["param_groups"]
        groups = [
            {**group, "lr": saved["lr"]} for group, saved in zip(present, state_dict["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": state_dict["state"], "param_groups": groups})


def identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """Return the settings that a state depends on, and the counts and the fingerprint that identify its data."""
    counts = {"train_samples": len(data.train), "classes": len(data.classes), "fingerprint": data.fingerprint}
    return {name: getattr(config, name) for name in IDENTIFYING} | counts
