"""Batch normalisation over the batches of all ranks. Runs on every rank."""

from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class HostSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm is on GPUs, for CPUs. Shares of the batch may be unequal.

    The formulas are those of Ioffe and Szegedy, "Batch normalization" (2015); the sums are over all ranks, and
    gradients flow through them.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Normalise [n, C, ...] per channel; without training, by the running statistics."""
        if not self.training:
            return functional.batch_norm(
                images, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        values = images.float()
        dims = [dim for dim in range(values.dim()) if dim != 1]
        count = _everybodys(values.new_tensor(values.numel() // values.shape[1]))
        mean = _everybodys(values.sum(dims, keepdim=True)) / count
        variance = _everybodys((values - mean).square().sum(dims, keepdim=True)) / count
        self._follow(mean.detach().flatten(), variance.detach().flatten() * (count / (count - 1)))
        normal = (values - mean) * torch.rsqrt(variance + self.eps)
        shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
        scaled: Tensor = normal * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(images.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow those of the batch."""
        tracked = cast("Tensor", self.num_batches_tracked)
        tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1 / float(tracked)
        cast("Tensor", self.running_mean).lerp_(mean, momentum)
        cast("Tensor", self.running_var).lerp_(variance, momentum)


class _Sum(torch.autograd.Function):
    """The sum over all ranks. Each rank's part has the gradient of all ranks' uses of the sum."""

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


def _everybodys(values: Tensor) -> Tensor:
    return cast("Tensor", _Sum.apply(values))


def convert_sync_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace all batch normalisation of a model by one that counts all ranks' images."""
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # The same parameters, buffers and settings, with another forward.
            module.__class__ = HostSyncBatchNorm
    return model
