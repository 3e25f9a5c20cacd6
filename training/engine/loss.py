"""Computes the loss of a training, on each rank's device. Evaluations always report the cross entropy instead."""

import torch
from torch import Tensor
from torch.nn import functional

from training.config.train_config import TrainConfig

# A mixed image shows a class if more than this share of the image is of the class; less is too little to see.
_SHOWN = 0.2


class Loss:
    """Computes the loss of logits and targets. Class weights depend on the training set only, not on the batch."""

    def __init__(self, config: TrainConfig, labels: Tensor, classes: int, device: torch.device) -> None:
        """Prepare the loss for a training set with these labels (int64 [n])."""
        self._binary, self._smoothing = config.loss == "bce", config.label_smoothing
        self._weights = balanced_weights(labels, classes).to(device) if config.class_weights == "balanced" else None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the images' losses. Targets are labels [n], or class shares of mixed images [n, classes].

        The binary cross entropy follows Wightman, Touvron and Jegou, "ResNet strikes back" (2021): each class that a
        mixed image shows is a full target, and the loss of an image is the mean over all classes.
        """
        if not self._binary:
            return functional.cross_entropy(
                logits, targets, self._weights, reduction="sum", label_smoothing=self._smoothing
            )
        classes = logits.shape[1]
        shown = functional.one_hot(targets, classes) if targets.dim() == 1 else targets > _SHOWN
        smoothed = shown.float() * (1 - self._smoothing) + self._smoothing / classes
        return functional.binary_cross_entropy_with_logits(logits, smoothed, reduction="sum") / classes


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """Return the weight of each class, float [classes]: n / (k * the class's images) for n images of k classes.

    A class without images has weight 0. The mean weight over the images is 1, so the loss and the learning rate keep
    their scale. King and Zeng, "Logistic regression in rare events data" (2001).
    """
    counts = torch.bincount(labels, minlength=classes).double()
    weights = len(labels) / (counts.count_nonzero() * counts)
    return weights.where(counts > 0, torch.zeros(())).float()
