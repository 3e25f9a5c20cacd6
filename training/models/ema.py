"""The exponential moving average (EMA) of a model. Runs on every rank, on the model's device."""

import copy

import torch
from torch import nn


class Ema:
    """A copy of a model whose weights are the exponential moving average of the model's.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992). torch's AveragedModel waits
    for the device in every step to find out whether it is the first.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self._decay = decay

    def update(self, model: nn.Module, step: int) -> None:
        """Add the model after `step` steps to the average; with more weight at first, to forget the random weights."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        # Parameters, and the batch statistics that belong to them.
        ours, theirs = ([*whose.parameters(), *whose.buffers()] for whose in (self.model, model))
        pairs = list(zip(ours, theirs, strict=True))
        averages = [average for average, _ in pairs if average.is_floating_point()]
        values = [value for average, value in pairs if average.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_(averages, values, weight)
            for average, value in pairs:
                if not average.is_floating_point():
                    average.copy_(value)
