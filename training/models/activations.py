"""Checkpoints activations: results inside a block are not kept, and the backward pass recomputes them.

Runs on every rank. Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.models.blocks import blocks_in_order
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

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_statistics(block)

    def call(*inputs: Any, **named: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

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
