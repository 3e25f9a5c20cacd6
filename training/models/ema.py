"""The exponential moving average of a model. Runs on every rank, on the model's device."""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A second model whose weights follow those of the first one: an average in which the past decays exponentially.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992). torch's AveragedModel does
    the same, but waits for the device in every step to see whether it is the first.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self._decay = decay

    def update(self, model: nn.Module, step: int) -> None:
        """Follow the model after `step` steps; more quickly in the beginning, to forget the random weights."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        averages = [average for average, _ in pairs if average.is_floating_point()]
        values = [value for average, value in pairs if average.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_(averages, values, weight)
            for average, value in pairs:
                if not average.is_floating_point():
                    average.copy_(value)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and batch statistics, which belong to the weights that they were made with."""
    return [*model.parameters(), *model.buffers()]
