"""Batch normalisation over the batches of all ranks. Runs on every rank."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.nn import functional as collective
from torch.nn import functional


class HostSyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm for a CPU, where torch has none. Shares of the batch may be unequal.

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


def _everybodys(values: Tensor) -> Tensor:
    """The sum over all ranks, with gradients."""
    return cast("Tensor", collective.all_reduce(values))  # type: ignore[no-untyped-call]


def synchronise(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace all batch normalisation of a model by one that counts all ranks' images."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if device.type == "cpu":
        for module in converted.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # The same parameters, buffers and settings, with another forward.
                module.__class__ = HostSyncBatchNorm
    return converted
