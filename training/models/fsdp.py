"""A model of which every rank holds a part: torch's FSDP2 in the place of DDP. Runs on every rank.

Imported only for `--strategy fsdp`: the import takes a second. Zhao et al., "PyTorch FSDP: experiences on scaling fully
sharded data parallel" (2023); of the two that torch has, this is `fully_shard`, which keeps the names of the tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from training.config.train_config import TrainConfig
from training.runtime.process_group import ProcessGroup

# Fewer weights are not worth messages of their own: they travel with what is around them.
_LEAST_WEIGHTS = 2**15


def shard(model: nn.Module, config: TrainConfig, group: ProcessGroup) -> nn.Module:
    """Keep of every parameter the rows that are this rank's, on its device; the same model, changed.

    One block after the other comes to the device and is cut there, so that it never holds the whole model.
    """
    # FSDP cuts rows, and takes weights in no other order.
    model.to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    policy = MixedPrecisionPolicy()
    if config.amp == "bf16":
        # Not autocast: its copies of the weights would be kept until the backward pass, those of the whole model.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _shard_norms(model, mesh)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _shard_norms(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep batch normalisation in float32, as autocast does: its statistics are. All of it is one message."""
    norms: list[nn.Module] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if norms:
        fully_shard(norms, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts to be gathered one at a time, the inner ones first; what is in none is gathered with the model itself.

    Models are rows of blocks, in Sequentials or lists, or have them as children. Not what is inside of a block: some
    use the weights of their children without calling them, as attention does.
    """
    found = [*_members(model), *(child for child in model.children() if not _is_row(child))]
    large = [part for part in dict.fromkeys(found) if sum(map(torch.numel, part.parameters())) >= _LEAST_WEIGHTS]
    return [part for part in large if not isinstance(part, FSDPModule)]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_row(module) and not _is_row(child):
            yield child
        else:
            yield from _members(child)


def _is_row(module: nn.Module) -> bool:
    """Whether it is but its children, one after the other. A list of modules is not even called."""
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward


class Sharded:
    """A sharded model, to be trained as one in DDP is: called, with all parts of a step but the last in `no_sync`.

    Nothing of the gradients stays here: after every part they are summed up and cut like the weights, for whole ones
    would take the memory that is to be saved.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._model, self._group = model, group
        self._begins = self._ends = True

    def __call__(self, images: Tensor) -> Tensor:
        """Float [n, channels, h, w] to [n, classes]. A step begins with rank 0's buffers on all ranks."""
        if self._begins:
            buffers = dict(self._model.named_buffers())
            for name, value in self._group.broadcast_copies(buffers).items():
                buffers[name].copy_(value)
        self._begins = self._ends
        return self._model(images)  # type: ignore[no-any-return]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In here are parts of a step that are not the last one."""
        self._ends = False
        try:
            yield
        finally:
            self._ends = True

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._model.zero_grad()


def gather_tensors(model: nn.Module, *, leads: bool) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a sharded model, whole, one after the other. All ranks must call this; only rank 0 gets them."""
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if leads:
            yield name, whole


@torch.no_grad()
def load_whole(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Have a sharded model begin with tensors that every rank has whole, as far as there are any."""
    for name, value in model.state_dict().items():
        if name in tensors and isinstance(value, DTensor):
            # Without a source: nobody need send anybody its rows.
            value.copy_(distribute_tensor(tensors[name], value.device_mesh, value.placements, src_data_rank=None))
        elif name in tensors:
            value.copy_(tensors[name])
