"""Loads --weights into a model at the start of its training. Runs on every rank; rank 0 reads the file."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc.base.errors import UserError
from training.checkpoint.state import TrainState
from training.config.model_names import resolve_weights
from training.models.factory import first_line, head_names
from training.models.parallel import load_full_state_dict
from training.runtime.process_group import ProcessGroup
from training.runtime.run_context import RunContext

StateDicts = Mapping[str, Mapping[str, Tensor]]
"""The state dicts in a file, by the keys that lead to them, such as `state_dict_ema`."""

# torch.compile, FSDP1 and torch's recomputation put these anywhere into the names of a model's tensors.
_WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# torchvision's DenseNet files have older names of layers, such as `norm.1` instead of `norm1`.
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


def load_initial_weights(context: RunContext, state: TrainState, group: ProcessGroup) -> str:
    """Load `--weights` into the model and its moving average. All ranks must call this.

    Returns:
        A text that names the file, the part of it that was used, and the layers that keep new, random weights.

    Raises:
        SharedError: the file cannot be read, or holds another model's weights.
    """
    config = context.config
    fitting, new, source, path = dict[str, Tensor](), list[str](), "", Path()
    with group.raise_on_all_ranks():
        if group.is_rank_zero and config.weights:
            path = resolve_weights(config.model, config.weights)
            fitting, new, source = select_weights(read_weights(path), state.model, path)
    weights = context.beat_with_each("start", group.broadcast_tensors(fitting))
    load_full_state_dict(state.model, weights, strict=False)
    if state.ema:
        state.ema.model.load_state_dict(state.model.state_dict())
    used = f"beginning with {path}" + (f" ({source})" if source else "")
    return used + (f", but a new {', '.join(new)}" if new else "")


def read_weights(path: Path) -> StateDicts:
    """Return the state dicts in a file. Pickled code is not run.

    Raises UserError if the file cannot be read, or does not hold tensors by name.
    """
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _load_tensors(path)
    except Exception as error:  # a damaged file may cause any error
        reason = "it holds more than tensors" if isinstance(error, UnpicklingError) else first_line(error)
        raise UserError(f"--weights is {path}, which cannot be read ({reason}): give another file") from error
    state_dicts = dict(_state_dicts(content)) if isinstance(content, Mapping) else {}
    if not state_dicts:
        raise UserError(f"--weights is {path}, which holds no tensors by name: give a state_dict")
    return state_dicts


class _Ignored:
    """Replaces the objects in a checkpoint that are neither tensors nor plain values, such as argparse.Namespace."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _load_tensors(path: Path) -> Any:
    """Return the content of a file of `torch.save`. Objects of unknown classes are replaced, so no code runs."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except ValueError:  # torch cannot list the classes in files from before torch 1.6
            names = ["argparse.Namespace"]
        with torch.serialization.safe_globals([(_Ignored, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True)


def _state_dicts(content: Mapping[Any, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every mapping in a file that holds tensors by name."""
    tensors = {
        _OLD_NAME.sub(r"\1\2.", _WRAPPERS.sub("", name)): value
        for name, value in content.items()
        if isinstance(name, str) and torch.is_tensor(value)
    }
    if tensors:
        yield ".".join(keys), tensors
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            yield from _state_dicts(value, (*keys, key))


def select_weights(state_dicts: StateDicts, model: nn.Module, path: Path) -> tuple[dict[str, Tensor], list[str], str]:
    """Return the tensors that fit a model, the layers of the head that stay random, and what they were called.

    Other programs save weights under various keys, with prefixes before the names. The tensors of the key and the
    prefix with which the most tensors fit are used. If several fit equally well, averaged weights (EMA) are used, as in
    timm, or else the first ones. Raises UserError if a layer outside the head has no fitting tensors.
    """
    own, heads = model.state_dict(), head_names(model)
    fits = {key: _prefixes(tensors, own) for key, tensors in state_dicts.items()}
    sources = {(key, prefix): count for key, counts in fits.items() for prefix, count in counts.items()}
    key, prefix = max(sources, key=lambda source: (sources[source], _is_average(source)))
    present = {name.removeprefix(prefix): value for name, value in state_dicts[key].items() if name.startswith(prefix)}
    fitting = {
        name: present[name] for name, value in own.items() if name in present and present[name].shape == value.shape
    }
    # Files from before torch 0.4.1 lack these counters, which only a BatchNorm without momentum uses.
    wanting = [name for name in own if name not in fitting and not name.endswith("num_batches_tracked")]
    layers = {_layer(name) for name in wanting}
    if wrong := [name for name in wanting if name.partition(".")[0] not in heads]:
        name, count = wrong[0], len({_layer(name) for name in wrong})
        missing = f"it has no weights of the right shape for {count} of the layers, such as {name}, "
        if name in present:
            missing += f"which has shape {list(present[name].shape)} instead of {list(own[name].shape)}"
        else:
            missing += f"but others, such as {min(present)}"
        raise UserError(f"--weights is {path}, which does not fit this model: {missing}")
    # Load all tensors of a layer, or none.
    complete = {name: value for name, value in fitting.items() if _layer(name) not in layers}
    return complete, sorted(layers), ", ".join(filter(None, (key, prefix)))


def _prefixes(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the prefixes with which names of a model are in a file, and how many tensors then fit."""
    counts = {"": 0}
    for name, value in tensors.items():
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            if (like := own.get(name[start:])) is not None and like.shape == value.shape:
                counts[name[:start]] = counts.get(name[:start], 0) + 1
    return counts


def _is_average(source: tuple[str, str]) -> bool:
    return "ema" in re.split(r"[._]", ".".join(source).lower())


def _layer(name: str) -> str:
    """Return the name of a tensor's layer. A tensor of the model itself, such as `pos_embed`, is its own layer."""
    return name.rpartition(".")[0] or name
