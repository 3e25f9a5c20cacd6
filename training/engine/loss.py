"""Computes the loss of a training, on each rank's device. Evaluations report the loss without weights and smoothing."""

import torch
from torch import Tensor
from torch.nn import functional

from training.config.train_config import TrainConfig


class Loss:
    """Computes the cross entropy. Class weights depend on the training set only, not on the batch."""

    def __init__(self, config: TrainConfig, labels: Tensor, classes: int, device: torch.device) -> None:
        """Prepare the loss for a training set with these labels (int64 [n])."""
        self._smoothing = config.label_smoothing
        self._weights = balanced_weights(labels, classes).to(device) if config.class_weights == "balanced" else None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses. Targets are labels [n], or class shares of mixed images [n, classes]."""
        smoothing = self._smoothing
        return functional.cross_entropy(logits, targets, self._weights, reduction="sum", label_smoothing=smoothing)


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """Return the weight of each class, float [classes]: n / (k * the class's images) for n images of k classes.

    A class without images has weight 0. The mean weight over the images is 1, so the loss and the learning rate keep
    their scale. King and Zeng, "Logistic regression in rare events data" (2001).
    """
    counts = torch.bincount(labels, minlength=classes).double()
    weights = len(labels) / (counts.count_nonzero() * counts)
    return weights.where(counts > 0, torch.zeros(())).float()
