"""The weights that a training begins with, if they are not random. Runs on every rank; rank 0 reads them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from hpc.core.errors import UserError
from training.checkpoint.state import TrainState
from training.config.pretrained import resolve_weights
from training.config.train_config import TrainConfig
from training.models.head import head_name
from training.models.parallel import load_full_state_dict
from training.runtime.process_group import ProcessGroup

# What others put around the weights in a file, and around their names.
_AROUND = ("model", "state_dict")
_PREFIXES = ("module.", "_orig_mod.")
# torchvision's DenseNets were saved when their layers had other names.
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
# Files from before torch 0.4.1 do not have it; only a BatchNorm without momentum uses it.
_OPTIONAL = "num_batches_tracked"


def load_initial_weights(config: TrainConfig, state: TrainState, group: ProcessGroup) -> str:
    """Have the model begin with `--weights`. All ranks must call this.

    Returns:
        What was done, for people.

    Raises:
        SharedError: the file cannot be read, or is another model's.
    """
    found, new, path = dict[str, Tensor](), list[str](), Path()
    with group.raise_on_all_ranks():
        if group.is_rank_zero and config.weights:
            path = resolve_weights(config.model, config.weights)
            found, new = choose(read_weights(path), state.model, path)
    told = load(group.broadcast_bytes(save(found) if group.is_rank_zero else None))
    load_full_state_dict(state.model, told, sharded=state.sharded, strict=False)
    if state.ema:
        state.ema.model.load_state_dict(state.model.state_dict())
    return f"beginning with {path}" + (f", but a new {', '.join(new)}" if new else "")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, under the names that the model's own code gives them. No pickle of it is run.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise UserError(f"--weights is {path}, which cannot be read ({reason}): give another file") from error
    content = next((content[name] for name in _AROUND if isinstance(content, Mapping) and name in content), content)
    if not isinstance(content, Mapping) or not all(torch.is_tensor(value) for value in content.values()):
        raise UserError(f"--weights is {path}, which holds no tensors by name: give a state_dict")
    return {_own_name(str(name)): value for name, value in content.items()}


def _load_pickle(path: Path) -> Any:
    from pickle import UnpicklingError  # noqa: PLC0415  # what torch raises if a file wants more than tensors

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError("it is no file of weights alone") from error


def _own_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _OLD_NAME.sub(r"\1\2.", name)


def choose(found: Mapping[str, Tensor], model: nn.Module, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that fit a model, and the layers of its head that there are none for.

    Raises:
        UserError: other parts of the model do not fit.
    """
    own, head = model.state_dict(), head_name(model)
    fitting = {name: found[name].contiguous().clone() for name in own if _fits(name, found, own)}
    layers = {name.rpartition(".")[0] for name in own.keys() - fitting.keys() if not name.endswith(_OPTIONAL)}
    wrong = sorted(layer for layer in layers if layer != head and not layer.startswith(f"{head}."))
    if wrong:
        missing = f"{len(wrong)} of its layers have other weights or none, such as {wrong[0]}"
        raise UserError(f"--weights is {path}, which is not of this model: {missing}")
    # A layer is taken as a whole or not at all.
    return {name: value for name, value in fitting.items() if name.rpartition(".")[0] not in layers}, sorted(layers)


def _fits(name: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    return name in found and found[name].shape == own[name].shape
