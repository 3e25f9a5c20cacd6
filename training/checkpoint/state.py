"""Everything that must survive a cut, in one place. Runs on every rank.

Randomness is counted (`training.runtime.counter_rng`), so there are no generators to save: the whole state of the
data is `epoch` and `samples_seen`. A saved state is tensors by name and plain numbers, in files without pickles.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpc.core.errors import UserError
from training.checkpoint.storage import NUMBERS, STATE_FILES
from training.config.rules import flag
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.models.ema import Ema
from training.runtime.progress import Progress

# Fields of the config that the saved state depends on: another value would make it another run.
_IDENTIFYING = (
    "model",
    "batch_size",
    "seed",
    "optimizer",
    "ema_decay",
    "image_size",
    "eval_image_size",
    "val_split",
    "freeze_backbone",
    "head_hidden",
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


# What the numbers of a state consist of.
_NUMBERS = ("progress", "scaler", "optimizer", "identity", "window", "accounting")


def read_numbers(files: Mapping[str, bytes], checkpoint: str) -> dict[str, Any]:
    """All of a saved state that is no tensor.

    Raises:
        UserError: another version of the trainer made it.
    """
    missing = set(STATE_FILES) - files.keys()
    numbers: dict[str, Any] = {} if missing else json.loads(files[NUMBERS])
    found, wanted = (files, STATE_FILES) if missing else (numbers, _NUMBERS)
    if not found.keys() >= set(wanted):
        raise UserError(
            f"{checkpoint} has {', '.join(sorted(found))} instead of {' and '.join(wanted)}: "
            "end the run with the version that began it, or use another --run-dir"
        )
    return numbers


@dataclass(kw_only=True)
class TrainState:
    """The model, the optimizer and the progress, to be saved and restored together.

    Whatever of a training is not in here is lost with its processes.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: Ema | None
    progress: Progress
    identity: dict[str, Any]
    sharded: bool = False
    """Whether each rank holds a part of every parameter, and of what the optimizer knows of it."""
    copies: list[torch.cuda.Event] = field(default_factory=list)
    """The ends of copies from the GPU that are under way."""

    def defer_update_until(self, copied: torch.cuda.Event | None) -> None:
        """Let the optimizer change nothing before this copy is there."""
        if copied:
            self.copies.append(copied)

    def wait_for_copies(self) -> None:
        """Before the optimizer's step: have the GPU wait for the copies under way. The host does not wait."""
        while self.copies:
            torch.cuda.current_stream().wait_event(self.copies.pop())

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated and kept: the average, if there is one."""
        return self.ema.model if self.ema else self.model

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they are at the moment, on their device: they change with the next step."""
        found = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        if self.ema:
            found |= {f"ema/{name}": value for name, value in self.ema.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{index}/{key}": value for key, value in values.items() if torch.is_tensor(value)}
        return found

    def buffers(self) -> list[str]:
        """The names of the tensors that the forward pass changes: batch statistics."""
        models = {"model/": self.model} | ({"ema/": self.ema.model} if self.ema else {})
        return [prefix + name for prefix, model in models.items() for name, _ in model.named_buffers()]

    def numbers(self) -> dict[str, Any]:
        """All that is no tensor, ready for JSON, which keeps every bit of a float."""
        return {
            "progress": asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "optimizer": self.optimizer.state_dict()["param_groups"],
            "identity": self.identity,
        }

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Become the state that was saved, which belongs to this run."""
        self.model.load_state_dict(_below("model/", tensors))
        if self.ema:
            self.ema.model.load_state_dict(_below("ema/", tensors))
        self._restore_optimizer(_below("optimizer/", tensors), numbers["optimizer"])
        if numbers["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(numbers["scaler"])
        for name, value in numbers["progress"].items():
            setattr(self.progress, name, value)

    def _restore_optimizer(self, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, key = name.split("/")
            state.setdefault(int(index), {})[key] = _laid_out_like(parameters[int(index)], value)
        # The learning rate is the step's; all other settings are matters of the flags, which may have changed.
        current = self.optimizer.state_dict()["param_groups"]
        groups = [{**group, "lr": saved["lr"]} for group, saved in zip(current, groups, strict=True)]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A value in its parameter's memory format: another one would make the optimizer take a slower way."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value
