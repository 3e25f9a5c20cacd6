"""Owns the state of a training: everything that must survive an interruption. Runs on every rank.

Each part registers with TrainState under a name, and has `state_dict` and `load_state_dict`. A state is saved as two
files without pickles: all tensors, named `part/key` (safetensors), and all other values by part (JSON). Random numbers
are computed from counters (`training.runtime.counter_rng`), so no generator is saved.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torchrelay.object_states import Saveable

from hpc.base.errors import UserError
from hpc.base.text import flag
from training.config.changes import IDENTIFYING
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.models.ema import Ema
from training.models.parallel import load_full_state_dict
from training.runtime.compat import scaler_tensors
from training.runtime.rank_device import DeviceCopy
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
    attempt: int
    """Number of this attempt at the run. Sharded snapshots of different attempts do not match."""
    sharded: bool
    """Whether each rank holds a shard of every parameter and of its optimizer state (FSDP)."""
    progress: Progress = field(default_factory=Progress)
    _parts: dict[str, Saveable] = field(default_factory=dict, init=False)
    copies: list[DeviceCopy] = field(default_factory=list, init=False)
    """Unfinished copies from the GPU to the host, for which `wait_for_copies` waits."""

    def __post_init__(self) -> None:
        """Register the parts that every training has."""
        self.register("model", _ModelState(self.model))
        if self.ema:
            self.register("ema", _ModelState(self.ema.model))
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

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of all parts, on their devices, and all other values. All ranks must call this.

        Raises:
            SharedError: more images are unreadable than --max-corrupt-images.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {"identity": self.identity, "attempt": self.attempt}
        for name, part in self._parts.items():
            saved = part.state_dict()
            tensors |= {f"{name}/{key}": value for key, value in saved.items() if torch.is_tensor(value)}
            values[name] = {key: value for key, value in saved.items() if not torch.is_tensor(value)}
        return tensors, values

    def allocator(
        self, shape_of: Callable[[Tensor], torch.Size] = lambda tensor: tensor.shape
    ) -> Callable[[str, Tensor], Tensor]:
        """Return a function that provides memory for a saved tensor from its name and a tensor of its shape and dtype.

        A model's tensor gets the memory of this state's own tensor. An optimizer's tensor of a parameter's shape gets
        new memory on the device. Others get new host memory. `shape_of` returns the saved shape of this state's tensor.
        """
        models = {"model/": self.model} | ({"ema/": self.ema.model} if self.ema else {})
        own: dict[str, Tensor] = {
            prefix + name: value for prefix, model in models.items() for name, value in model.state_dict().items()
        }
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def allocate(name: str, like: Tensor) -> Tensor:
            part, _, key = name.partition("/")
            # For a tensor that does not fit, allocate its saved shape: `load_state_dict` will refuse the tensor.
            if name in own and like.shape == shape_of(own[name]):
                return own[name]
            parameter = parameters[int(key.split("/")[0])] if part == "optimizer" else None
            if parameter is not None and like.shape == shape_of(parameter):
                # Use the parameter's memory format: with another one the optimizer would take a slower path.
                return torch.empty_like(parameter, dtype=like.dtype)
            return torch.empty(like.shape, dtype=like.dtype)

        return allocate

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore a state that `check_compatible` accepts. Its tensors must be in memory from `allocator`."""
        for name, part in self._parts.items():
            prefix = f"{name}/"
            saved = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            # A disabled GradScaler saves an empty state, which an enabled one refuses to load.
            if saved := saved | values[name]:
                part.load_state_dict(saved)

    def check_compatible(self, values: Mapping[str, Any], checkpoint: str) -> None:
        """Check that the values of a saved state belong to this run.

        Raises:
            UserError: the data or a flag that the state depends on has changed, or another version made the state.
        """
        saved = values.get("identity", {})
        if missing := sorted((self._parts.keys() - values.keys()) | (self.identity.keys() - saved.keys())):
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
            return {"scale": torch.tensor(scaler.get_scale()), "growth_tracker": torch.tensor(0, dtype=torch.int32)}
        return {"scale": scale, "growth_tracker": tracker}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        restored = {"scale": float(state_dict["scale"]), "_growth_tracker": int(state_dict["growth_tracker"])}
        self._scaler.load_state_dict(self._scaler.state_dict() | restored)


class _ModelState:
    """Saves a model's tensors by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        # If the model is sharded, its tensors were already read as shards.
        load_full_state_dict(self._model, state_dict.items(), sharded=False)


class _OptimizerState:
    """Saves an optimizer's tensors, named `PARAMETER_INDEX/KEY`, and its parameter groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        saved = self._optimizer.state_dict()
        state = {f"{index}/{key}": value for index, values in saved["state"].items() for key, value in values.items()}
        return {name: value for name, value in state.items() if torch.is_tensor(value)} | {
            "param_groups": saved["param_groups"]
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in state_dict.items():
            if torch.is_tensor(value):
                index, key = name.split("/")
                state.setdefault(int(index), {})[key] = value
        # Settings come from the flags, which may have changed. The next step sets its own learning rate, but a state
        # that is saved again before that step must be the restored one, bit by bit.
        current, saved = self._optimizer.state_dict()["param_groups"], state_dict["param_groups"]
        groups = [{**group, "lr": before["lr"]} for group, before in zip(current, saved, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """Return the settings that a state depends on, and the counts and the fingerprint that identify its data."""
    counts = {"train_samples": len(data.train), "classes": len(data.classes), "fingerprint": data.fingerprint}
    return {name: getattr(config, name) for name in IDENTIFYING} | counts
