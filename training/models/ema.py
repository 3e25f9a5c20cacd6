"""Averages a model's weights over its steps (EMA). Runs on every rank, on the model's device."""

import copy

import torch
from torch import Tensor, nn

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
        averages, values = ([*whose.parameters(), *whose.buffers()] for whose in (self.model, model))
        pairs = list(zip(averages, (value.detach() for value in values), strict=True))
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    def update(self, step: int) -> None:
        """Add the model after `step` steps to the average. Early updates weigh more, to forget the random weights."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        with torch.no_grad():
            average_each(*_unzip(self._averaged), weight)
            if self._copied:
                copy_each(*_unzip(self._copied))


def _unzip(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [average for average, _ in pairs], [value for _, value in pairs]
