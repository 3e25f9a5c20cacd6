"""Averages a model's weights over its steps (EMA). Runs on every rank, on the model's device."""

import copy

import torch
from torch import nn

from training.runtime.compat import average_each, copy_each


class Ema:
    """The exponential moving average of a model, a copy of the model with averaged weights.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992). torch's AveragedModel is not
    used: it waits for the device in every step to find out whether the step is the first one.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self._decay = decay
        # Collect parameters and batch statistics once, since that takes a millisecond.
        both = [[value.detach() for value in (*each.parameters(), *each.buffers())] for each in (self.model, model)]
        self._averaged = [[value for value in values if value.is_floating_point()] for values in both]
        self._copied = [[value for value in values if not value.is_floating_point()] for values in both]

    def update(self, step: int) -> None:
        """Add the model after `step` steps to the average. Early updates weigh more, to forget the random weights."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        (averages, values), (copies, counts) = self._averaged, self._copied
        with torch.no_grad():
            average_each(averages, values, weight)
            if copies:
                copy_each(copies, counts)
