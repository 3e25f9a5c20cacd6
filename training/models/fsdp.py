"""Shards a model over the ranks by torch's FSDP2 (`fully_shard`). Runs on every rank.

Imported only for `--strategy fsdp`: the import takes a second. Zhao et al., "PyTorch FSDP: experiences on scaling fully
sharded data parallel" (2023). Unlike torch's first FSDP, `fully_shard` keeps the names of the tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.config.train_config import TrainConfig
from training.models.blocks import is_row, row_members
from training.runtime.compat import BatchNorm
from training.runtime.process_group import ProcessGroup

# A block with fewer weights is gathered together with its parent: a message of its own would not pay off.
_MIN_WEIGHTS = 2**15


def shard(model: nn.Module, config: TrainConfig, group: ProcessGroup) -> nn.Module:
    """Shard the model in place: this rank keeps its rows of every parameter, on its device.

    Blocks are moved to the device and sharded one at a time, so the device never holds the whole model.
    """
    # FSDP shards rows, and takes only contiguous tensors.
    model.to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    policy = MixedPrecisionPolicy()
    if config.amp == "bf16":
        # autocast would keep copies of the whole model's weights until the backward pass.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Batch normalization stays in float32, as with autocast. One message gathers all these layers.
        norms: list[nn.Module] = [module for module in model.modules() if isinstance(module, BatchNorm)]
        if norms:
            fully_shard(norms, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one at a time, inner ones first. Other weights are gathered with the model.

    Blocks are the members of Sequentials and lists, and the model's children. A block's children are not sharded on
    their own, because some blocks, such as attention, use their children's weights without calling the children.
    """
    candidates = [*row_members(model), *(child for child in model.children() if not is_row(child))]
    large = [part for part in dict.fromkeys(candidates) if sum(map(torch.numel, part.parameters())) >= _MIN_WEIGHTS]
    return [part for part in large if not isinstance(part, FSDPModule)]


class FsdpModel:
    """A sharded model with the interface of DDP. All micro-batches of a step but the last run in `no_sync`.

    Unlike DDP's, this `no_sync` postpones no reduction: gradients are reduced and sharded after each micro-batch,
    because unsharded gradients would take the memory that FSDP saves.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, *, syncs_buffers: bool) -> None:
        self._model, self._group, self._syncs_buffers = model, group, syncs_buffers
        self._first_part = self._last_part = True

    def __call__(self, images: Tensor) -> Tensor:
        """Map float [n, channels, h, w] to [n, classes]. If `syncs_buffers`, each step begins with rank 0's buffers."""
        if self._syncs_buffers and self._first_part:
            buffers = dict(self._model.named_buffers())
            for name, value in self._group.broadcast_copies(buffers).items():
                buffers[name].copy_(value)
        self._first_part = self._last_part
        return self._model(images)  # type: ignore[no-any-return]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter this context for each micro-batch of a step but the last."""
        self._last_part = False
        try:
            yield
        finally:
            self._last_part = True
