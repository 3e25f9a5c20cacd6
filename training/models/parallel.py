"""What is done to a model for its training: the compiler and DDP with its options, or FSDP. Runs on every rank.

None of it changes the names of the model's tensors, nor how it is evaluated.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.config.train_config import TrainConfig
from training.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from training.models.fsdp import Sharded

# Shapes by ranks, parts of a step and the pass that warms up: more than the few that torch allows by default.
_MOST_SHAPES = 64


def place_model(model: nn.Module, config: TrainConfig, group: ProcessGroup) -> nn.Module:
    """The model on this rank's device, or with `--strategy fsdp` its part of it. The optimizer comes after this."""
    if config.strategy == "ddp":
        return model.to(group.device)
    from training.models.fsdp import shard  # noqa: PLC0415  # a second, which DDP does without

    return shard(model, config, group)


def wrap_for_training(
    model: nn.Module, config: TrainConfig, group: ProcessGroup
) -> "DistributedDataParallel | Sharded":
    """The model in DDP, or as FSDP has sharded it.

    Before the first forward pass of a step every rank gets rank 0's batch statistics: those are saved. Gradients are
    views of DDP's buckets, which saves a copy of all.
    """
    if config.strategy == "fsdp":
        from training.models.fsdp import Sharded  # noqa: PLC0415  # as above

        return Sharded(model, group)
    if config.compile:
        compile_training(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=config.static_graph)
    if config.compress_gradients == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def full_state_dict(model: nn.Module, group: ProcessGroup, *, sharded: bool) -> Iterable[tuple[str, Tensor]]:
    """On rank 0 every tensor of a model by name, one after the other; nothing elsewhere. All ranks must call this."""
    if not sharded:
        return model.state_dict().items() if group.is_rank_zero else ()
    from training.models.fsdp import gather_tensors  # noqa: PLC0415  # as above

    return gather_tensors(model, leads=group.is_rank_zero)


def load_full_state_dict(
    model: nn.Module, tensors: Mapping[str, Tensor], *, sharded: bool, strict: bool = True
) -> None:
    """Have a model become tensors that every rank has whole; unless `strict`, as far as there are any."""
    if not sharded:
        model.load_state_dict(tensors, strict=strict)
        return
    from training.models.fsdp import load_whole  # noqa: PLC0415  # as above

    load_whole(model, tensors)


def compile_training(model: nn.Module) -> None:
    """Have the forward pass of a training compiled, and so its backward pass; an evaluation is as without.

    What is computed must not depend on which shapes a process has met before, nor on what was fastest there: every
    shape has code of its own, chosen by rule.
    """
    torch._dynamo.config.recompile_limit = _MOST_SHAPES  # noqa: SLF001  # there is no public way
    eager = model.forward
    compiled = torch.compile(eager, dynamic=False, options={"deterministic": True})

    def forward(images: Tensor) -> Any:
        return compiled(images) if model.training else eager(images)

    # Not torch's OptimizedModule, which would put its prefix before all names.
    model.forward = forward


def compiler_error(error: RuntimeError) -> str:
    """What a compiler that does not work says, in a line; empty if the error is another one."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415  # a second, and only with a compiler loaded

    if not isinstance(error, BackendCompilerFailed):
        return ""
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))
