"""Batch normalisation over the global batch (`--sync-bn`). Runs on every rank.

On GPUs it is torch's SyncBatchNorm. That refuses tensors on a CPU, so ranks on CPUs use the module here.
"""

from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def convert_sync_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace the model's batch normalisation by one over the batches of all ranks."""
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # The same parameters, buffers and settings, with another forward.
            module.__class__ = CpuSyncBatchNorm
    return model


class CpuSyncBatchNorm(_BatchNorm):
    """Ioffe and Szegedy, "Batch normalization" (2015), with mean and variance over all ranks' images.

    Ranks may have different numbers of images. Gradients flow through the sums over ranks.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Normalise [n, C, ...] per channel: by the global batch in training, else by the running statistics."""
        if not self.training:
            return functional.batch_norm(
                images, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        values = images.float()
        dims = [dim for dim in range(values.dim()) if dim != 1]
        count = _all_reduce_sum(values.new_tensor(values.numel() // values.shape[1]))
        mean = _all_reduce_sum(values.sum(dims, keepdim=True)) / count
        variance = _all_reduce_sum((values - mean).square().sum(dims, keepdim=True)) / count
        self._update_running(mean.detach().flatten(), variance.detach().flatten() * (count / (count - 1)))
        normal = (values - mean) * torch.rsqrt(variance + self.eps)
        shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
        scaled: Tensor = normal * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(images.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        batches = cast("Tensor", self.num_batches_tracked)
        batches.add_(1)
        momentum = self.momentum if self.momentum is not None else 1 / float(batches)
        cast("Tensor", self.running_mean).lerp_(mean, momentum)
        cast("Tensor", self.running_var).lerp_(variance, momentum)


class _AllReduceSum(torch.autograd.Function):
    """The sum over all ranks. Its gradient is the sum of all ranks' gradients, because every rank uses it."""

    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total


def _all_reduce_sum(values: Tensor) -> Tensor:
    return cast("Tensor", _AllReduceSum.apply(values))
