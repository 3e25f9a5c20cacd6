"""Prepares a model for training with DDP and the compiler, or with FSDP. Runs on every rank.

Neither DDP, the compiler nor FSDP changes the names of the model's tensors or its evaluations.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrelay.saving.tensor_files import is_sharded

from training.config.train_config import TrainConfig
from training.models.blocks import checkpoint_activations
from training.models.factory import first_line
from training.runtime.compat import BatchNorm, configure_compiler, is_compiler_error
from training.runtime.process_group import ProcessGroup, SharedError

if TYPE_CHECKING:
    from training.models.fsdp import FsdpModel

# The shapes of batches differ between numbers of ranks and micro-batches: torch's default limit is too low.
_MAX_SHAPES = 64


def place_model(model: nn.Module, config: TrainConfig, group: ProcessGroup) -> nn.Module:
    """Move the model to the device; with FSDP, only this rank's shard. Call this before the optimizer is made."""
    if config.strategy == "ddp":
        return model.to(group.device)
    from training.models.fsdp import shard  # noqa: PLC0415  # takes a second, which DDP saves

    return shard(model, config, group)


def wrap_for_training(
    model: nn.Module, config: TrainConfig, group: ProcessGroup
) -> "DistributedDataParallel | FsdpModel | nn.Module":
    """Wrap the model in DDP, or in `FsdpModel` if FSDP has sharded it. A single rank's model stays as it is.

    With one rank, DDP would change no bit, but copy all gradients into its buckets in each step.

    In training, each rank has its own batch statistics; saved states and evaluations use rank 0's. Gradients are views
    of DDP's buckets, which saves a copy of all gradients. Raises SharedError if --checkpoint-activations is on, but the
    model has no blocks.
    """
    if config.checkpoint_activations and not checkpoint_activations(model):
        raise SharedError(f"--checkpoint-activations finds no blocks to recompute in {config.model}: leave it out")
    if config.strategy == "fsdp":
        from training.models.fsdp import FsdpModel  # noqa: PLC0415  # takes a second

        return FsdpModel(model, group, syncs_buffers=has_other_buffers(model))
    if config.compile:
        compile_training(model, group.cores, repeatable=config.deterministic != "off")
    if group.world_size == 1:
        return model
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # The constructor's argument has different names in torch 2.11 and 2.15.
    ddp.broadcast_buffers = has_other_buffers(model)
    if config.compress_gradients == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def has_other_buffers(model: nn.Module) -> bool:
    """Return whether a model has buffers other than batch statistics.

    Batch statistics need no broadcast: training reads only the statistics of frozen layers, which are equal on all
    ranks.
    """
    norms = {buffer for module in model.modules() if isinstance(module, BatchNorm) for buffer in module.buffers()}
    return not norms.issuperset(model.buffers())


def postpone_reduction(wrapped: "DistributedDataParallel | FsdpModel | nn.Module") -> AbstractContextManager[None]:
    """Return the context of each micro-batch of a step but the last: the gradients are reduced after the last one."""
    if isinstance(wrapped, nn.Module) and not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()


def full_state_dict(model: nn.Module, group: ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and full tensors of a model, on rank 0 only. All ranks must exhaust the iterator."""
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if is_sharded(value) else value
        if group.is_rank_zero:
            yield name, whole


@torch.no_grad()
def load_full_state_dict(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True) -> None:
    """Load full tensors, which every rank must have, into a model. Unless `strict`, some may be missing.

    This replaces `nn.Module.load_state_dict`, which fails for torchvision's MNASNet because files lack its version.
    Raises RuntimeError if the model has no tensor of a name and shape or, if `strict`, a tensor of the model is
    missing.
    """
    own = model.state_dict()
    missing = set(own)
    for name, value in tensors:
        if name not in own or own[name].shape != value.shape:
            raise RuntimeError(f"the model has no {name} of shape {list(value.shape)}")
        target = own[name]
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # takes a second

            # Every rank has the full value, so nothing is sent.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # noqa: PLW2901
        target.copy_(value)
        missing.discard(name)
    if strict and missing:
        raise RuntimeError(f"{len(missing)} tensors of the model are missing, such as {min(missing)}")


def compile_training(model: nn.Module, cores: int, *, repeatable: bool = True) -> None:
    """Compile the forward pass of training, and so its backward pass. Evaluations are not compiled.

    All ranks compile at the same time, each in as many processes as it has `cores`. Results must depend neither on the
    shapes that a process has seen before nor on timing: so every shape gets its own code and, if `repeatable`,
    `deterministic` turns off autotuning.
    """
    configure_compiler(cores, _MAX_SHAPES)
    eager = model.forward
    compiled = torch.compile(eager, dynamic=False, options={"deterministic": repeatable})

    def forward(images: Tensor) -> Any:
        return compiled(images) if model.training else eager(images)

    # torch's OptimizedModule would put a prefix before the names of all tensors.
    model.forward = forward


def compiler_error(error: RuntimeError) -> str:
    """Return the first line of a compiler's error, or an empty text for other errors."""
    return first_line(error) if is_compiler_error(error) else ""
