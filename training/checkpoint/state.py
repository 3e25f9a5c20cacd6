"""The state of a training: everything that must survive an interruption, in one place. Runs on every rank.

Each part registers with TrainState under a name, and has `state_dict` and `load_state_dict`. A state is saved as the
tensors of all parts by `part/key` (safetensors), and all else by part (JSON): no pickles. Random numbers are computed
from counters (`training.runtime.counter_rng`), so there are no generators to save.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpc.base.errors import UserError
from hpc.base.text import flag
from training.config.changes import IDENTIFYING
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.models.ema import Ema
from training.models.parallel import load_full_state_dict
from training.relay.object_states import Saveable
from training.runtime.compat import scaler_tensors
from training.runtime.rank_device import DeviceCopy
from training.runtime.train_progress import Progress

# Not finite if the training has diverged: such a state must not replace a good one.
LOSS = "loss_meter/loss"


_Part = TypeVar("_Part", bound=Saveable)


@dataclass(kw_only=True)
class TrainState:
    """The parts of a training's state, and the copies of it that are under way."""

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: Ema | None
    identity: dict[str, Any]
    """Settings and data that a saved state must have in common with this one."""
    attempt: int
    """The number of this attempt at the run: snapshots of shards match only within one."""
    sharded: bool
    """Whether each rank holds a shard of every parameter and of its optimizer state (FSDP)."""
    progress: Progress = field(default_factory=Progress)
    _parts: dict[str, Saveable] = field(default_factory=dict, init=False)
    copies: list[DeviceCopy] = field(default_factory=list, init=False)
    """Copies from the GPU, for which `wait_for_copies` waits."""

    def __post_init__(self) -> None:
        """Register the parts that every training has."""
        self.register("model", _ModelState(self.model))
        if self.ema:
            self.register("ema", _ModelState(self.ema.model))
        self.register("optimizer", _OptimizerState(self.optimizer))
        self.register("scaler", _ScalerState(self.scaler))
        self.register("progress", self.progress)

    def register(self, name: str, part: _Part) -> _Part:
        """Save and restore this part too. Return the part.

        Its state dict maps names to tensors, which the training may go on changing, or to what JSON holds. All ranks
        call `state_dict` at the same step, so it may communicate.
        """
        self._parts[name] = part
        return part

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of all parts, on their devices, and all other values. All ranks must call this.

        Raises:
            SharedError: there are more unreadable images than are allowed.
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
        """Return a function that finds memory for a saved tensor, given its name and any tensor of its type and shape.

        A model's tensors go into those of this state, an optimizer's into new memory on the device, and all others into
        new memory of the host. `shape_of` returns the shape in which a tensor of this state is saved.
        """
        models = {"model/": self.model} | ({"ema/": self.ema.model} if self.ema else {})
        own: dict[str, Tensor] = {
            prefix + name: value for prefix, model in models.items() for name, value in model.state_dict().items()
        }
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def allocate(name: str, like: Tensor) -> Tensor:
            part, _, key = name.partition("/")
            # `load_state_dict` refuses what does not fit.
            if name in own and like.shape == shape_of(own[name]):
                return own[name]
            parameter = parameters[int(key.split("/")[0])] if part == "optimizer" else None
            if parameter is not None and like.shape == shape_of(parameter):
                # In its parameter's memory format: with another one the optimizer would take a slower path.
                return torch.empty_like(parameter, dtype=like.dtype)
            return torch.empty(like.shape, dtype=like.dtype)

        return allocate

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore a state of this run (`check_compatible`), whose tensors are in memory of the `allocator`."""
        for name, part in self._parts.items():
            prefix = f"{name}/"
            saved = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            # A disabled GradScaler saves an empty state, which an enabled one refuses to load.
            if saved := saved | values[name]:
                part.load_state_dict(saved)

    def check_compatible(self, values: Mapping[str, Any], checkpoint: str) -> None:
        """Check that the values of a saved state belong to this run.

        Raises:
            UserError: a flag that the state depends on has changed, the data has, or another version made the state.
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
        """Let the GPU finish the copies under way, before the state is changed. The host does not wait."""
        while self.copies:
            self.copies.pop().make_device_wait()


class _ScalerState:
    """Saves a loss scale as tensors on the device: GradScaler's own `state_dict` waits for the device.

    The state is empty without `--amp fp16`.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scaler = self._scaler
        if not scaler.is_enabled():
            return {}
        # Before its first step the scaler has neither.
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
        # Sharded tensors were read in shards.
        load_full_state_dict(self._model, state_dict.items(), sharded=False)


class _OptimizerState:
    """Saves an optimizer's state by `index of the parameter/key`, and its parameter groups."""

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
        # The learning rate is the last step's; all other settings follow the flags, which may have changed.
        current, saved = self._optimizer.state_dict()["param_groups"], state_dict["param_groups"]
        groups = [{**group, "lr": before["lr"]} for group, before in zip(current, saved, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """Return the settings that a state depends on, and the counts and the fingerprint that identify its data."""
    counts = {"train_samples": len(data.train), "classes": len(data.classes), "fingerprint": data.fingerprint}
    return {name: getattr(config, name) for name in IDENTIFYING} | counts
