"""Captures the states of a script's objects, and loads them back. Runs on every rank.

Modules, optimizers and schedulers are equal on all ranks (DDP), or each rank holds a shard (FSDP, tensor parallelism):
their tensors are never joined. Each rank has its own state of every other object and of the random number generators.
"""

from __future__ import annotations  # torch is imported only when a function is called

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..rank_exchange import RankGroup
from .shards import Part, is_sharded, part_of
from .tensor_files import TensorLayout, has_name
from .values import deserialized, join, random_states, restore_random, serialized, split

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Saveable(Protocol):
    """An object that can be saved: a module, optimizer, scheduler, torchdata's StatefulDataLoader, or your own."""

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of tensors, numbers, texts, lists and dicts. All ranks call this at the same step."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A state as this rank holds it. Its tensors are the training's own, on their devices."""

    step: int
    parts: dict[str, Part]
    """What this rank holds of each tensor, by name."""
    values: dict[str, Any]
    """All else that is equal on all ranks, for JSON."""
    own: list[bytes]
    """What each rank has of its own; empty texts if ranks have nothing."""
    shards: list[int]
    """For each rank, the number of the shard that it holds; all 0 if each holds the whole state."""

    @cached_property
    def layout(self) -> TensorLayout:
        """The layout of the file for what this rank holds."""
        return TensorLayout.of(self.parts)


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects of a state, by name."""

    shared: Mapping[str, Saveable]
    """Those that are equal on all ranks, or of which each rank holds a shard: saved once."""
    own: Mapping[str, Saveable] = field(default_factory=dict)
    """Those that each rank has of its own."""

    @classmethod
    def of_script(cls, objects: Mapping[str, Saveable]) -> Self:
        """Return a script's objects: modules, optimizers and schedulers are shared."""
        shared = {name: each for name, each in objects.items() if _is_shared(each)}
        own = {name: each for name, each in objects.items() if name not in shared}
        return cls(shared=_adapted(shared), own={**own, "random numbers": _RandomNumbers()})


class _RandomNumbers:
    """The random number generators of this rank."""

    def state_dict(self) -> dict[str, Any]:
        return random_states()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        restore_random(state)


def capture(objects: Objects, step: int, peers: RankGroup) -> Captured:
    """Capture the present state. All ranks must call this.

    Raises:
        TypeError: an object's state could be saved but not restored.
        RuntimeError: the ranks hold different tensors, which are not shards.
    """
    tensors: dict[str, Tensor] = {}
    values = {name: _split(name, each, tensors) for name, each in objects.shared.items()}
    parts = {name: _part(name, value) for name, value in tensors.items()}
    parts |= _buffers_of_rank_zero(objects, tensors, parts, peers)
    data = _serialized_own(objects) if objects.own else b""
    held = _Held.of(parts)
    every = peers.all_gather_bytes(held.digest + data)
    digests = [each[: len(held.digest)] for each in every]
    if any(digest[: _Held.HALF] != held.digest[: _Held.HALF] for digest in digests):
        raise RuntimeError(_difference(parts, peers))
    return Captured(
        step=step, parts=parts, values=values, own=[each[len(held.digest) :] for each in every],
        shards=[list(dict.fromkeys(digests)).index(digest) for digest in digests],
    )  # fmt: skip


def _serialized_own(objects: Objects) -> bytes:
    data = serialized({name: each.state_dict() for name, each in objects.own.items()})
    try:
        deserialized(data)
    except UnpicklingError:
        for name, each in objects.own.items():
            check_content(name, each.state_dict())
        raise
    return data


@dataclass(frozen=True)
class _Held:
    """Digests of the tensors' whole shapes and dtypes, equal on all ranks, and of the blocks that a rank holds."""

    digest: bytes
    HALF = 16

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> _Held:
        whole = repr([(name, part.tensor.dtype, part.block.whole) for name, part in parts.items()])
        blocks = repr([(part.block.offset, part.block.shape) for part in parts.values()])
        return cls(b"".join(hashlib.sha256(text.encode()).digest()[: cls.HALF] for text in (whole, blocks)))


def _difference(parts: Mapping[str, Part], peers: RankGroup) -> str:
    """Return which tensors differ between the ranks. All ranks must call this."""
    lines = [f"{name} {tuple(part.block.whole)} {part.tensor.dtype}" for name, part in parts.items()]
    every = [set(text.decode().split("\n")) for text in peers.all_gather_bytes("\n".join(lines).encode())]
    other = next(rank for rank, each in enumerate(every) if each != every[0])
    example = next(iter(sorted(every[0] ^ every[other])))
    return (
        f"state(): rank 0 and rank {other} have different tensors, such as {example}: modules and optimizers must be "
        "the same on all ranks, whole (DDP) or in shards (FSDP, DTensor)"
    )


def _is_shared(one: Any) -> bool:
    """Return whether all ranks hold the same state of an object, or shards of one state."""
    from torch import nn, optim

    return isinstance(one, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler)


def _split(name: str, one: Saveable, tensors: dict[str, Tensor]) -> Any:
    state = one.state_dict()
    try:
        return split(name, state, tensors)
    except UnpicklingError:
        check_content(name, state)
        raise


def _part(name: str, value: Any) -> Part:
    try:
        part = part_of(value)
    except ValueError as error:
        raise TypeError(f"state({name.partition('/')[0]}=...): {name} cannot be saved: {error}") from error
    if not has_name(part.tensor.dtype):
        raise TypeError(f"state({name.partition('/')[0]}=...): {name} cannot be saved: it has {part.tensor.dtype}")
    return part


def _buffers_of_rank_zero(
    objects: Objects, tensors: Mapping[str, Tensor], parts: Mapping[str, Part], peers: RankGroup
) -> dict[str, Part]:
    """Return the modules' buffers with rank 0's content. Batch statistics differ by rank, and DDP uses rank 0's."""
    from torch import nn

    modules = {name: each for name, each in objects.shared.items() if isinstance(each, nn.Module)}
    names = [f"{name}/{key}" for name, module in modules.items() for key, _ in module.named_buffers()]
    buffers = {name: parts[name] for name in names if name in parts and not is_sharded(tensors[name])}
    copies = peers.broadcast_copies({name: part.tensor for name, part in buffers.items()})
    return {name: Part(tensor=copies[name], block=part.block) for name, part in buffers.items()}


def check_restorable(objects: Objects) -> None:
    """Raise TypeError if the state of one of the objects could be saved but not restored. All ranks must call this."""
    from torch import nn

    for name, each in {**objects.shared, **objects.own}.items():
        if not isinstance(each, nn.Module | _Fsdp1):
            check_content(name, each.state_dict())


def check_content(name: str, content: Any) -> None:
    """Raise TypeError if the state `content` of an object could be saved but not restored."""
    try:
        split(name, content, {})
    except UnpicklingError as error:
        raise TypeError(
            f"state({name}=...): its state_dict() holds more than tensors, numbers and texts, so it could not be "
            f"restored: {error}"
        ) from error


# --- restoring ---


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A state that is being loaded: memory for its tensors, and what to do once they are there."""

    parts: dict[str, Part] = field(default_factory=dict)
    """The memory for what this rank needs of each saved tensor, by name."""
    loads: list[Callable[[], object]] = field(default_factory=list)

    def memory_for(
        self, of: str, memory: Callable[[str, Tensor], Tensor], wholes: Mapping[str, Tensor], saved: str
    ) -> Tensor:
        """Return memory for the tensor `saved` of an object."""
        tensor = memory(saved.removeprefix(f"{of}/"), wholes[saved])
        self.parts[saved] = part_of(tensor)
        return tensor

    def finish(self) -> None:
        """Load the tensors, which are in the memory, into the objects."""
        for load in self.loads:
            load()


def begin_loading(objects: Objects, values: Mapping[str, Any], own: bytes, wholes: Mapping[str, Tensor]) -> Loading:
    """Provide memory for a saved state. All ranks must call this.

    Args:
        objects: those to restore.
        values: the saved values of the shared objects.
        own: what a rank had of its own, or an empty text.
        wholes: the saved tensors as tensors on the meta device, by name. A module's get the memory of its own tensors.

    Raises:
        KeyError: the state was saved from objects of other names.
    """
    states = deserialized(own) if own else {}
    saved, present = {*values, *states}, {*objects.shared, *objects.own}
    if saved != present:
        raise KeyError(f"the saved state is of {_list(saved)}, and state() got {_list(present)}")
    loading = Loading()
    for name, each in objects.shared.items():
        state = join(values[name], partial(loading.memory_for, name, _memory_for(each), wholes))
        loading.loads.append(partial(_load, each, state))
    loading.loads.extend(partial(each.load_state_dict, states[name]) for name, each in objects.own.items())
    return loading


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(name for name in names if name.isidentifier())) or "no objects"


def _load(one: Saveable, state: dict[str, Any]) -> None:
    one.load_state_dict(_named_as(one, state))


def _memory_for(one: Saveable) -> Callable[[str, Tensor], Tensor]:
    """Return a function that provides memory for a saved tensor, from its name and a tensor of its shape and dtype."""
    import torch
    from torch import nn, optim

    def new(_name: str, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    if isinstance(one, nn.Module | _Fsdp1):
        present: dict[str, Tensor] = {}
        split("", one.state_dict(), present)
        named = {name.removeprefix("/"): tensor for name, tensor in present.items()}
        plain = _plain_names(named)
        by_name = {plain(name): tensor for name, tensor in named.items()}

        def of_module(name: str, like: Tensor) -> Tensor:
            tensor = by_name.get(plain(name))
            return new(name, like) if tensor is None or tensor.shape != like.shape else tensor

        return of_module
    one = getattr(one, "optimizer", one)  # of an object that saves an optimizer in its own way
    if isinstance(one, optim.Optimizer):
        parameters = [each for group in one.param_groups for each in group["params"]]

        def of_optimizer(name: str, like: Tensor) -> Tensor:
            kind, _, rest = name.partition("/")
            index = rest.partition("/")[0] if kind == "state" else ""
            parameter = parameters[int(index)] if index.isdecimal() and int(index) < len(parameters) else None
            if parameter is None or parameter.shape != like.shape:
                return new(name, like)
            # In the parameter's memory format: with another one, the optimizer would take a slower path.
            return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)

        return of_optimizer
    return new


def _plain_name(name: str) -> str:
    """Return a tensor's name without what wrappers (torch.compile, DDP) add: a later attempt may have other ones."""
    return ".".join(part for part in name.split(".") if part not in {"_orig_mod", "module"})


def _plain_names(*states: Collection[str]) -> Callable[[str], str]:
    """Return `_plain_name`, unless two names of a state would then be equal: else, a function that changes none."""
    return _plain_name if all(len(set(map(_plain_name, names))) == len(names) for names in states) else str


def _named_as(one: Saveable, state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state with the names of the present one, if only wrappers differ."""
    from torch import nn

    if not isinstance(one, nn.Module):
        return state
    # The present state also has the modules' versions. Some modules of torchvision refuse a state without versions.
    present = one.state_dict()
    plain = _plain_names(present, state)
    names = {plain(name): name for name in present}
    named = {names.get(plain(name), name): value for name, value in state.items()}
    present.clear()
    present.update(named)
    return present


# --- FSDP1 ---


class _Fsdp1:
    """A module or an optimizer of FSDP1, whose own `state_dict` would join all shards. DCP gives the shards."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._module, self._optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as dcp

        if self._optimizer is None:
            return dcp.get_model_state_dict(self._module)
        return dcp.get_optimizer_state_dict(self._module, self._optimizer)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        from torch.distributed.checkpoint import state_dict as dcp

        if self._optimizer is None:
            dcp.set_model_state_dict(self._module, state)
        else:
            dcp.set_optimizer_state_dict(self._module, self._optimizer, state)


def _adapted(objects: Mapping[str, Saveable]) -> dict[str, Saveable]:
    """Return the objects, with those of FSDP1 as `_Fsdp1`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by the script, if it uses FSDP1
    if fsdp is None:
        return dict(objects)
    from torch import nn, optim

    modules = [
        each
        for each in objects.values()
        if isinstance(each, nn.Module) and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in each.modules())
    ]
    owners = {id(parameter): module for module in modules for parameter in module.parameters()}
    adapted = dict(objects)
    for name, each in objects.items():
        if any(each is module for module in modules):
            adapted[name] = _Fsdp1(each)  # type: ignore[arg-type]  # a module
        elif isinstance(each, optim.Optimizer):
            first = next((one for group in each.param_groups for one in group["params"]), None)
            if id(first) in owners:
                adapted[name] = _Fsdp1(owners[id(first)], each)
    return adapted
