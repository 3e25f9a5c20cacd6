"""Finds the blocks of a model, to shard or train each at its own rate, or to recompute it. Runs on every rank.

Recomputation: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.models.factory import last_layer_names
from training.runtime.compat import BatchNorm


def checkpoint_activations(model: nn.Module) -> int:
    """Make the model keep only each block's input, from which the backward pass recomputes the block.

    Both passes draw the same dropout, so results do not change. Nor do evaluations or the names of tensors. Single
    layers are left out, because their input is kept anyway. Returns the number of recomputed blocks.
    """
    blocks = [block for block in blocks_in_order(model) if _is_worth_it(block)]
    for block in blocks:
        # A copy of the model that is made later would call this block's forward, so make the moving average before.
        block.forward = _recomputed(block)
    return len(blocks)


def _is_worth_it(block: nn.Module) -> bool:
    return any(True for _ in block.children()) and any(True for _ in block.parameters())


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def call(*inputs: Any, **named: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*inputs, **named)
        return checkpoint(
            forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _keep_statistics(block)), **named
        )

    return call


@contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Let the second forward pass of a block change only copies of the batch statistics."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


def is_row(module: nn.Module) -> bool:
    """Return whether a module is a Sequential or a list. A list is a module without a forward."""
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward


def row_members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of Sequentials and lists in a module, but none inside another member."""
    for child in module.children():
        if is_row(module) and not is_row(child):
            yield child
        else:
            yield from row_members(child)


def blocks_in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of Sequentials and lists, and the layers outside of them, in the order of the model's code."""
    for child in module.children():
        is_member = is_row(module) and not is_row(child)
        # timm's stages are modules that hold a row named `blocks`.
        is_stage = isinstance(getattr(child, "blocks", None), nn.Sequential | nn.ModuleList)
        if (is_member and not is_stage) or not any(is_row(part) for part in child.modules()):
            yield child
        else:
            yield from blocks_in_order(child)


def depths(model: nn.Module) -> dict[str, int]:
    """Return for each parameter, by name, the number of blocks before it in the order of the model's code.

    Norms and embeddings belong to the block before them, or to the first one. The last layers are a block.
    """
    block_of: dict[nn.Parameter, nn.Module] = {}
    last_layers = nn.ModuleList(map(model.get_submodule, last_layer_names(model)))
    of_last_layers = dict.fromkeys(last_layers.parameters(), last_layers)
    for block in blocks_in_order(model):
        if any(parameter.dim() > 1 and parameter not in of_last_layers for parameter in block.parameters()):
            block_of.update(dict.fromkeys(block.parameters(), block))
    block_of |= of_last_layers
    depth_of: dict[str, int] = {}
    begun: list[nn.Module] = []
    for name, parameter in model.named_parameters():
        if parameter in block_of and block_of[parameter] not in begun[-1:]:
            begun.append(block_of[parameter])
        depth_of[name] = max(len(begun) - 1, 0)
    return depth_of
