"""Captures the states of a script's objects for a save, and loads them back. Runs on every rank.

Modules, optimizers and schedulers are saved once for all ranks, with whole tensors even if the ranks hold shards. Each
rank saves its own state of every other object and of the random number generators.
"""

import io
import random
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, Protocol

from .rank_exchange import all_gather_bytes, ranks
from .this_rank import THIS_RANK

if TYPE_CHECKING:
    from torch import Tensor

# Name of the file with a script's state, in the directory of a checkpoint or snapshot.
STATE_FILE = "state.pt"


class Saveable(Protocol):
    """An object that can be saved: a module, optimizer, scheduler, torchdata's StatefulDataLoader, or your own."""

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of tensors, numbers, texts, lists and dicts. All ranks call this at the same step."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore what `state_dict` returned."""


class CopyMemory:
    """Memory for the tensors of a copy, which the next copy overwrites: new memory would take four times as long."""

    def __init__(self) -> None:
        self._before: dict[tuple[Any, ...], Tensor] = {}
        self._tensors: dict[tuple[Any, ...], Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes of the last copy."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def begin(self) -> None:
        """Begin a copy. Memory that it does not use is freed by the next one."""
        self._before, self._tensors = self._tensors, {}

    def copy(self, place: tuple[Any, ...], tensor: "Tensor") -> "Tensor":
        """Return a copy of a tensor. `place` is where it is in the state."""
        import torch

        is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_nested:
            return tensor.detach().to("cpu", copy=True)
        memory = self._before.get(place)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            # A tensor that is made in inference mode cannot be changed outside of it.
            with torch.inference_mode(mode=False):
                memory = torch.empty_like(tensor, device="cpu", requires_grad=False)
        self._tensors[place] = memory
        return memory.copy_(tensor.detach())


def capture_states(objects: Mapping[str, Saveable], step: int, memory: CopyMemory) -> dict[str, Any]:
    """Copy the objects' states to `memory`. Only local rank 0 keeps shared tensors. All ranks must call this."""
    writes = THIS_RANK.local_rank == 0
    memory.begin()
    shared = {
        name: _copied(each.state_dict(), memory, (name,), keep=writes)
        for name, each in objects.items()
        if _is_shared(each)
    }
    own = {name: each.state_dict() for name, each in objects.items() if not _is_shared(each)}
    data = serialized({"objects": own, "random": random_states()})
    try:
        deserialized(data)
    except UnpicklingError:
        for name, content in own.items():
            _check_content(name, content)
        raise
    every = all_gather_bytes(data, ranks.group)
    return {"step": step, "world_size": THIS_RANK.world_size, "shared": shared, "own": every}


def _is_shared(one: Saveable) -> bool:
    """Return whether all ranks hold the same state of an object, or shards of one state."""
    from torch import nn, optim

    return isinstance(one, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler)


def _copied(value: Any, memory: CopyMemory, place: tuple[Any, ...], *, keep: bool) -> Any:
    """Copy a state to `memory`; without `keep`, its tensors become None. All ranks must call this: it joins shards."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return memory.copy(place, whole) if keep else None
    if isinstance(value, dict):
        return {key: _copied(each, memory, (*place, key), keep=keep) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each, memory, (*place, at), keep=keep) for at, each in enumerate(value))
    return value


def uses_gpu() -> bool:
    """Return whether this rank computes on a GPU."""
    import torch

    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]  # torch's own


def random_states() -> dict[str, Any]:
    """Return the states of this rank's random number generators: torch's (CPU and GPU) and Python's."""
    import torch

    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if uses_gpu():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_random(states: Mapping[str, Any]) -> None:
    """Restore the random number generators to states from `random_states`."""
    import torch

    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def serialized(content: Any) -> bytes:
    """Return the content as bytes that `load_states` can read."""
    buffer = io.BytesIO()
    serialize(content, buffer)
    return buffer.getvalue()


def serialize(content: Any, file: IO[bytes]) -> None:
    """Write the content to a file, as bytes that `load_states` can read. Raises OSError if the write fails."""
    import torch

    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # which torch's writer hides
            raise error.__context__ from error
        raise


def deserialized(data: bytes) -> Any:
    """Return the content that `serialized` made into bytes. Pickled code is not run, but raises UnpicklingError."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_restorable(objects: Mapping[str, Saveable]) -> None:
    """Raise TypeError if the state of one of the objects could be saved but not restored."""
    from torch import nn

    for name, each in objects.items():
        if not isinstance(each, nn.Module):
            _check_content(name, _copied(each.state_dict(), CopyMemory(), (), keep=True))


def _check_content(name: str, content: Any) -> None:
    try:
        deserialized(serialized(content))
    except UnpicklingError as error:
        raise TypeError(
            f"state({name}=...): its state_dict() holds more than tensors, numbers and texts, so it could not be "
            f"restored: {error}"
        ) from error


def load_states(objects: Mapping[str, Saveable], data: bytes) -> None:
    """Load a serialized state into the objects. Raises KeyError if it was saved from objects of other names."""
    content = deserialized(data)
    every = content["own"]
    # If there are more ranks than at the save, some continue with the same state as others.
    own = deserialized(every[THIS_RANK.rank % len(every)])
    states = {**content["shared"], **own["objects"]}
    if states.keys() != objects.keys():
        raise KeyError(
            f"the saved state is of {', '.join(sorted(states))}, and state() got {', '.join(sorted(objects))}"
        )
    for name, each in objects.items():
        each.load_state_dict(_in_shards(each, states[name]))
    restore_random(own["random"])


def _in_shards(one: Saveable, content: dict[str, Any]) -> dict[str, Any]:
    """Return the state `content`, with its tensors sharded like the parameters of `one` (FSDP2)."""
    from torch import nn, optim

    if isinstance(one, nn.Module):
        current = one.state_dict()
        loaded = {name: _like(current.get(name), value) for name, value in content.items()}
        # `current` also has the modules' versions. Some modules of torchvision refuse a state without versions.
        current.clear()
        current.update(loaded)
        return current
    if not isinstance(one, optim.Optimizer):
        return content
    parameters = [each for group in one.param_groups for each in group["params"]]
    values = {
        index: {name: _like(parameters[int(index)], value) for name, value in each.items()}
        for index, each in content["state"].items()
    }
    return {**content, "state": values}


def _like(model: Any, value: Any) -> Any:
    """Return the tensor `value` sharded like `model`, or unchanged if `model` is not sharded or has another shape."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(model, DTensor) or not isinstance(value, torch.Tensor) or value.shape != model.shape:
        return value
    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)
