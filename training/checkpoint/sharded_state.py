"""A state in parts: with `--strategy fsdp` a rank saves what it holds, and takes what it needs of anybody's parts.

The files are safetensors in the form that torch's distributed checkpoints (DCP) have for them: each says where in the
whole its tensors begin. DCP reads them into any number of ranks. It does not write them: its writer would talk with the
other ranks about who writes what, which is known, and copy everything once more. No pickle is in them.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.checkpoint.state import TrainState
from training.checkpoint.storage import TENSORS
from training.runtime.process_group import ProcessGroup

# torch.distributed.checkpoint.HuggingFaceStorageReader looks for these.
_SHARDS, _BEGINS = "DCP_SHARDING_INFO", "saved_offsets"


def part_name(group: ProcessGroup) -> str:
    """The file of a rank's part."""
    return f"state-{group.rank:05d}-of-{group.world_size:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Which part of a state a rank holds: by default all of it."""

    file: str = TENSORS
    begins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Where in the whole the rank's shards begin, in each dimension, by name. All ranks have all other tensors."""

    def chosen(self, tensors: Mapping[str, Tensor], *, shared: bool) -> dict[str, Tensor]:
        """Those to be written: without what all have, if another rank writes it."""
        return {name: value for name, value in tensors.items() if shared or name in self.begins}

    def header(self, tensors: Mapping[str, Tensor]) -> dict[str, str] | None:
        """What is written above the tensors of a part; nothing above those of a whole state."""
        if self.file == TENSORS:
            return None
        begins = {name: {_BEGINS: self.begins.get(name, [0] * value.dim())} for name, value in tensors.items()}
        return {_SHARDS: json.dumps(begins)}


def own_part(tensors: Mapping[str, Tensor], group: ProcessGroup) -> tuple[dict[str, Tensor], ShardLayout]:
    """What this rank holds of sharded tensors, on its device, and where that belongs."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # a second, which DDP does without

    shards = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    begins = {name: _begin(value) for name, value in shards.items()}
    held = {name: shards[name].to_local() if name in shards else value for name, value in tensors.items()}
    return held, ShardLayout(file=part_name(group), begins=begins)


def _begin(shard: Any) -> tuple[int, ...]:
    """Where in the whole it begins: what DCP asks a tensor too."""
    return tuple(shard.__create_chunk_list__()[0].offsets)


def read_own_part(directory: Path, state: TrainState, group: ProcessGroup) -> dict[str, Tensor]:
    """The tensors of a state as this rank holds them, of what this very rank has saved, one of as many."""
    saved = load_file(directory / part_name(group))
    rooms = _rooms(state, saved, lambda parameter: _held(parameter).shape)
    for name, value in saved.items():
        _held(rooms[name]).copy_(value)
    return rooms


def read_parts(directory: Path, state: TrainState) -> dict[str, Tensor]:
    """The tensors of a state as this rank holds them, of however many parts, or of a whole one."""
    return _load(directory, _rooms(state, _saved(directory), lambda parameter: parameter.shape))


def read_whole(directory: Path) -> dict[str, Tensor]:
    """The tensors of a state put together, in the host's memory."""
    if (directory / TENSORS).exists():
        return load_file(directory / TENSORS)
    return _load(directory, {name: torch.empty_like(value, device="cpu") for name, value in _saved(directory).items()})


def _rooms(
    state: TrainState, saved: Mapping[str, Tensor], shape_of: Callable[[Tensor], torch.Size]
) -> dict[str, Tensor]:
    """Where saved tensors are to go: those of the model where they are, new ones of the optimizer.

    Args:
        state: of this rank.
        saved: tensors of the saved shapes and types.
        shape_of: what is saved of a parameter, or of what the optimizer knows of each of its numbers.
    """
    there = state.tensors()
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]

    def room(name: str, value: Tensor) -> Tensor:
        parameter = parameters[int(name.split("/")[1])]
        like = parameter if value.shape == shape_of(parameter) else torch.empty(value.shape)
        return torch.empty_like(like, dtype=value.dtype)

    return {name: there[name] if name in there else room(name, value) for name, value in saved.items()}


def _held(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def _saved(directory: Path) -> dict[str, Tensor]:
    """What there is, without its numbers."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415  # as above

    found: Mapping[str, Any] = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: torch.empty(value.size, dtype=value.properties.dtype, device="meta") for name, value in found.items()}


def _load(directory: Path, rooms: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415  # as above
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    with warnings.catch_warnings():
        # A rank that asks for nothing but its own shards is taken for one that is alone.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(rooms, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return rooms
