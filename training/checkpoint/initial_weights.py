"""Loads --weights into a model at the start of its training. Runs on every rank; rank 0 reads the file."""

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc.base.errors import UserError
from training.checkpoint.state import TrainState
from training.config.model_names import resolve_weights
from training.models.factory import first_line, head_name
from training.models.parallel import load_full_state_dict
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

# Other programs may save the weights under one of these keys, and put these prefixes before the tensors' names.
_KEYS = ("model", "state_dict")
_PREFIXES = ("module.", "_orig_mod.")
# torchvision's DenseNet files have older names of layers, such as `norm.1` instead of `norm1`.
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


def load_initial_weights(context: RunContext, state: TrainState, group: ProcessGroup) -> str:
    """Load `--weights` into the model and its moving average. All ranks must call this.

    Returns:
        A text that names the file and the layers that keep new, random weights.

    Raises:
        SharedError: the file cannot be read, or holds another model's weights.
    """
    config = context.config
    found, new, path = dict[str, Tensor](), list[str](), Path()
    with group.raise_on_all_ranks():
        if group.is_rank_zero and config.weights:
            path = resolve_weights(config.model, config.weights)
            found, new = select_weights(read_weights(path), state.model, path)
    weights = context.beat_with_each("start", group.broadcast_tensors(found))
    load_full_state_dict(state.model, weights, sharded=state.sharded, strict=False)
    if state.ema:
        state.ema.model.load_state_dict(state.model.state_dict())
    return f"beginning with {path}" + (f", but a new {', '.join(new)}" if new else "")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file by the names that they have in the model. Pickled code is not run.

    Raises:
        UserError: the file cannot be read, or does not hold tensors by name.
    """
    try:
        is_safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, KeyError, UnpicklingError) as error:
        reason = "it holds more than tensors" if isinstance(error, UnpicklingError) else first_line(error)
        raise UserError(f"--weights is {path}, which cannot be read ({reason}): give another file") from error
    content = next((content[name] for name in _KEYS if isinstance(content, Mapping) and name in content), content)
    if not isinstance(content, Mapping) or not all(torch.is_tensor(value) for value in content.values()):
        raise UserError(f"--weights is {path}, which holds no tensors by name: give a state_dict")
    return {_own_name(str(name)): value for name, value in content.items()}


def _own_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _OLD_NAME.sub(r"\1\2.", name)


def select_weights(found: Mapping[str, Tensor], model: nn.Module, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that fit a model, and the names of the head's layers that lack a tensor and stay random.

    Raises:
        UserError: a layer outside the head has no fitting tensors.
    """
    own, head = model.state_dict(), head_name(model)
    fits = [name for name, value in own.items() if name in found and found[name].shape == value.shape]
    fitting = {name: found[name] for name in fits}
    # Files from before torch 0.4.1 lack these counters, which only a BatchNorm without momentum uses.
    wanting = [name for name in own.keys() - fitting.keys() if not name.endswith("num_batches_tracked")]
    layers = {name.rpartition(".")[0] for name in wanting}
    wrong = sorted(layer for layer in layers if layer != head and not layer.startswith(f"{head}."))
    if wrong:
        missing = f"it has no weights of the right shape for {len(wrong)} of the layers, such as {wrong[0]}"
        raise UserError(f"--weights is {path}, which does not fit this model: {missing}")
    # Load all tensors of a layer, or none.
    return {name: value for name, value in fitting.items() if name.rpartition(".")[0] not in layers}, sorted(layers)
