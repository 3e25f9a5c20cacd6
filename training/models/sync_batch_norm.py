"""Normalizes over the batch of all ranks (--sync-bn). Runs on every rank.

torch's own SyncBatchNorm refuses tensors on a CPU. On a GPU, it makes the host wait three times in each layer to look
for ranks without images, but here every rank has images.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from training.runtime.compat import BatchNorm


def convert_sync_batch_norm(model: nn.Module) -> nn.Module:
    """Make the model's batch normalization use the global batch, and return the model."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            # Only `forward` changes: parameters, buffers and settings stay.
            module.__class__ = SyncBatchNorm
    return model


class SyncBatchNorm(BatchNorm):
    """Batch normalization (Ioffe and Szegedy, 2015) with mean and variance over all ranks' images.

    Ranks may have different numbers of images, but at least one. Gradients flow through the statistics of all ranks.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Normalize [n, C, ...] per channel, by the global batch in training, else by the running statistics."""
        if not self.training:
            return functional.batch_norm(
                images, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        batches = cast("Tensor", self.num_batches_tracked)
        batches.add_(1)
        # Without a momentum, the running statistics are the mean of all batches.
        momentum = self.momentum if self.momentum is not None else 1 / float(batches)
        return cast("Tensor", _Normalize.apply(images, self.weight, self.bias, self, momentum))


class _Normalize(torch.autograd.Function):
    """Gathers each rank's mean and deviation per channel on all ranks, which then normalize in the same way."""

    @staticmethod
    def forward(
        context: Any, images: Tensor, weight: Tensor, bias: Tensor, norm: SyncBatchNorm, momentum: float
    ) -> Tensor:
        images, kernels, eps = _dense(images), _kernels(images), norm.eps
        mean, invstd = kernels.batch_norm_stats(images, eps)
        mine = torch.cat([mean, invstd, mean.new_full((1,), images.numel() // images.shape[1])])
        everyone = mine.new_empty(distributed.get_world_size(), len(mine))
        distributed.all_gather(list(everyone.unbind()), mine)
        means, invstds, counts = torch.split(everyone, images.shape[1], dim=1)
        mean, invstd = kernels.batch_norm_gather_stats_with_counts(
            images, means, invstds, norm.running_mean, norm.running_var, momentum, eps, counts.flatten()
        )
        context.save_for_backward(images, weight, mean, invstd, counts.flatten().int())
        return cast("Tensor", kernels.batch_norm_elemt(images, weight, bias, mean, invstd, eps))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, invstd, counts = context.saved_tensors
        gradient, kernels = _dense(gradient), _kernels(gradient)
        wanted = context.needs_input_grad
        sums, products, weight_gradient, bias_gradient = kernels.batch_norm_backward_reduce(
            gradient, images, mean, invstd, weight, *wanted[:3]
        )
        images_gradient = None
        if wanted[0]:
            # DDP reduces the gradients of weight and bias, but the gradients of images need the sums of all ranks here.
            both = torch.cat([sums, products])
            distributed.all_reduce(both)
            sums, products = both.chunk(2)
            images_gradient = kernels.batch_norm_backward_elemt(
                gradient, images, mean, invstd, weight, sums, products, counts
            )
        return images_gradient, weight_gradient, bias_gradient, None, None


def _dense(values: Tensor) -> Tensor:
    """Return the values in a memory format that the kernels support."""
    return values if values.is_contiguous(memory_format=torch.channels_last) else values.contiguous()


# --- for CPUs: the kernels that torch has only for GPUs ---


def _kernels(values: Tensor) -> Any:
    return torch if values.is_cuda else _CPU_KERNELS


def _stats(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_at_least_float32(images), _all_but_channels(images), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(  # noqa: PLR0913, PLR0917  # torch's arguments
    _images: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total = counts.sum()
    weights = (counts / total)[:, None]
    mean = (means * weights).sum(0)
    variance = ((invstds**-2 - eps + (means - mean).square()) * weights).sum(0)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)
    return mean, torch.rsqrt(variance + eps)


def _normalize(images: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, _eps: float) -> Tensor:
    scale = invstd * weight
    centered = _at_least_float32(images) - _per_channel(mean, images)
    return (centered * _per_channel(scale, images) + _per_channel(bias, images)).to(images.dtype)


def _backward_reduce(
    gradient: Tensor, images: Tensor, mean: Tensor, invstd: Tensor, _weight: Tensor, *_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims, gradient = _all_but_channels(images), _at_least_float32(gradient)
    sums = gradient.sum(dims)
    products = (gradient * (_at_least_float32(images) - _per_channel(mean, images))).sum(dims)
    return sums, products, products * invstd, sums


def _backward_normalize(  # noqa: PLR0913, PLR0917  # torch's arguments
    gradient: Tensor,
    images: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    centered = _at_least_float32(images) - _per_channel(mean, images)
    of_mean, of_deviation = _per_channel(sums / total, images), _per_channel(products / total * invstd**2, images)
    rest = _at_least_float32(gradient) - of_mean - centered * of_deviation
    return (rest * _per_channel(invstd * weight, images)).to(images.dtype)


_CPU_KERNELS = SimpleNamespace(
    batch_norm_stats=_stats,
    batch_norm_gather_stats_with_counts=_gather_stats,
    batch_norm_elemt=_normalize,
    batch_norm_backward_reduce=_backward_reduce,
    batch_norm_backward_elemt=_backward_normalize,
)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _all_but_channels(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view([-1 if dim == 1 else 1 for dim in range(like.dim())])
