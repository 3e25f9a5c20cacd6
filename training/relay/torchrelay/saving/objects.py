"""Captures the states of a script's objects, and loads them back. Runs on every rank.

Modules, optimizers and schedulers are equal on all ranks (DDP), or each rank holds a shard (FSDP, tensor parallelism):
their tensors are never joined. Each rank has its own state of every other object and of the random number generators.
"""

from __future__ import annotations  # torch is imported only when a function is called

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..rank_exchange import RankGroup, raise_for_others, reason_of
from .tensor_files import Part, TensorLayout, has_name, is_sharded, part_of
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
    layout: TensorLayout
    """The layout of the file for what this rank holds."""
    values: dict[str, Any]
    """All else that is equal on all ranks, for JSON."""
    own: list[bytes]
    """What each rank has of its own; empty texts if ranks have nothing."""
    sizes: Sequence[int]
    """For each rank, the bytes of the file for what it holds."""
    shards: list[int]
    """For each rank, the number of the shard that it holds; all 0 if each holds the whole state."""


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects of a state, by name."""

    shared: Mapping[str, Saveable]
    """Those that are equal on all ranks, or of which each rank holds a shard: saved once."""
    own: Mapping[str, Saveable] = field(default_factory=dict)
    """Those that each rank has of its own."""

    @classmethod
    def of_script(cls, objects: Mapping[str, Saveable]) -> Self:
        """Sort a script's objects: modules, optimizers and schedulers are shared, the others belong to each rank.

        So do the random number generators, which are added.
        """
        from torch import nn, optim

        kinds = nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler
        shared = {name: each for name, each in objects.items() if isinstance(each, kinds)}
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
        OtherRankError: another rank has raised an error.
        RuntimeError: the ranks hold different tensors, which are not shards.
    """
    tensors: dict[str, Tensor] = {}
    failure: Exception | None = None
    values, parts, own, layout = dict[str, Any](), dict[str, Part](), b"", TensorLayout({})
    try:
        values = {name: split(name, each.state_dict(), tensors) for name, each in objects.shared.items()}
        parts = {name: _part(name, value) for name, value in tensors.items()}
        own = _serialized_own(objects)
        layout = TensorLayout.of({name: (part.tensor.dtype, part.block) for name, part in parts.items()})
    except Exception as error:  # noqa: BLE001  # it is raised below, when the other ranks know
        failure = error
    wholes = "\n".join(sorted(f"{name} {tuple(part.block.whole)} {part.tensor.dtype}" for name, part in parts.items()))
    digests = [hashlib.sha256(data).hexdigest() for data in (wholes.encode(), layout.header)]
    message = json.dumps([reason_of(failure) if failure else "", layout.size_bytes, *digests])
    every = [data.partition(b"\n") for data in peers.all_gather_bytes(message.encode() + b"\n" + own)]
    problems, sizes, of_wholes, of_blocks = zip(*(json.loads(head) for head, _, _ in every), strict=True)
    if failure:
        raise failure
    raise_for_others(problems)
    if len(set(of_wholes)) > 1:
        raise RuntimeError(_difference(wholes, peers))
    parts |= _buffers_of_rank_zero(objects, tensors, parts, peers)
    shards = list(dict.fromkeys(of_blocks))
    return Captured(
        step=step, parts=parts, values=values, layout=layout, own=[data for _, _, data in every], sizes=sizes,
        shards=[shards.index(digest) for digest in of_blocks],
    )  # fmt: skip


def _serialized_own(objects: Objects) -> bytes:
    if not objects.own:
        return b""
    states = {name: each.state_dict() for name, each in objects.own.items()}
    data = serialized(states)
    try:
        deserialized(data)
    except UnpicklingError:
        for name, state in states.items():
            split(name, state, {})
        raise
    return data


def _difference(wholes: str, peers: RankGroup) -> str:
    """Return which tensors differ between the ranks. All ranks must call this."""
    every = [set(text.decode().split("\n")) for text in peers.all_gather_bytes(wholes.encode())]
    other = next(rank for rank, each in enumerate(every) if each != every[0])
    example = min(every[0] ^ every[other])
    return (
        f"state(): rank 0 and rank {other} have different tensors, such as {example}: modules and optimizers must be "
        "the same on all ranks, whole (DDP) or in shards (FSDP, DTensor)"
    )


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
            split(name, each.state_dict(), {})


# --- restoring ---


def begin_loading(
    objects: Objects, values: Mapping[str, Any], own: bytes, wholes: Mapping[str, Tensor]
) -> tuple[dict[str, Part], list[Callable[[], object]]]:
    """Provide memory for a saved state. All ranks must call this.

    Returns the memory for what this rank needs of each saved tensor, by name, and functions that load the objects: call
    them once the tensors are in the memory.

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
    parts, loads = dict[str, Part](), list[Callable[[], object]]()

    def memory(of: str, provide: Callable[[str, Tensor], Tensor], name: str) -> Tensor:
        tensor = provide(name.removeprefix(f"{of}/"), wholes[name])
        parts[name] = part_of(tensor)
        return tensor

    for name, each in objects.shared.items():
        state = join(values[name], partial(memory, name, _memory_for(each)))
        loads.append(partial(_load, each, state))
    loads.extend(partial(each.load_state_dict, states[name]) for name, each in objects.own.items())
    return parts, loads


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(name for name in names if name.isidentifier())) or "no objects"


def _memory_for(one: Saveable) -> Callable[[str, Tensor], Tensor]:
    """Return a function that provides memory for a saved tensor, from its name and a tensor of its shape and dtype."""
    import torch
    from torch import nn, optim

    def new(_name: str, like: Tensor) -> Tensor:
        # With the meta device, `empty_like` imports sympy, which takes half a second in each restart.
        return torch.empty(like.shape, dtype=like.dtype)

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


def _load(one: Saveable, state: dict[str, Any]) -> None:
    """Load a state; a module's with the names of the present one, if only wrappers differ."""
    from torch import nn

    if isinstance(one, nn.Module):
        # The present state also has the modules' versions. Some modules of torchvision refuse a state without versions.
        present = one.state_dict()
        plain = _plain_names(present, state)
        names = {plain(name): name for name in present}
        named = {names.get(plain(name), name): value for name, value in state.items()}
        present.clear()
        present.update(named)
        state = present
    one.load_state_dict(state)


# --- FSDP1 ---


class _Fsdp1:
    """A module or an optimizer of FSDP1, whose own `state_dict` would join all shards. DCP gives the shards."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        from torch.distributed.checkpoint import state_dict as dcp

        self._of: tuple[Any, ...] = (module,) if optimizer is None else (module, optimizer)
        self._get: Any = dcp.get_model_state_dict if optimizer is None else dcp.get_optimizer_state_dict
        self._set: Any = dcp.set_model_state_dict if optimizer is None else dcp.set_optimizer_state_dict

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._get(*self._of)
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._set(*self._of, state)


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
