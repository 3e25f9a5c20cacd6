"""Mixes each image with a partner in its batch (mixup and cutmix). Runs on every rank, on its device.

The mix depends only on seed and step. Partners are the images 0 and 1, 2 and 3, ... of the global batch, which is in
random order. Partners are on the same rank (`BatchSchedule.samples_per_group`), so they do not depend on the number of
ranks. The last image of an odd batch is not mixed.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.config.train_config import TrainConfig
from training.runtime.counter_rng import Purpose, derive_key


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """How the images of a step are mixed."""

    lam: float
    """Weight of each image, lambda in the papers. Its partner has the weight 1 - `lam`."""
    box: tuple[int, int, int, int] | None
    """For cutmix, top, bottom, left and right of the partner's box in pixels; None for mixup."""


def draw_mix(config: TrainConfig, step: int, size: int) -> Mixup | None:
    """Return a random mix for images of `size` x `size` pixels after `step` steps; None without --mixup and --cutmix.

    Mixup: Zhang et al., "mixup: Beyond empirical risk minimization" (2018). Cutmix: Yun et al., "CutMix" (2019). With
    both flags, each step uses one of them, with equal probability.
    """
    if not config.mixup and not config.cutmix:
        return None
    random = np.random.Generator(np.random.Philox(derive_key(config.seed, Purpose.MIX, step)))
    if config.mixup and (not config.cutmix or random.random() < 0.5):
        return Mixup(lam=random.beta(config.mixup, config.mixup), box=None)
    # The box is a square of random area around a random pixel. Clipping it to the image changes lambda.
    half = size * math.sqrt(1 - random.beta(config.cutmix, config.cutmix)) / 2
    row, column = random.integers(0, size, 2)
    top, bottom = (int(min(max(edge, 0), size)) for edge in (row - half, row + half))
    left, right = (int(min(max(edge, 0), size)) for edge in (column - half, column + half))
    return Mixup(lam=1 - (bottom - top) * (right - left) / size**2, box=(top, bottom, left, right))


def mix_images(mix: Mixup, images: Tensor) -> Tensor:
    """Return mixed images (float [n, C, H, W]). The first image must have an even place in the global batch."""
    partners = _partners(images)
    if mix.box is None:
        return images * mix.lam + partners * (1 - mix.lam)
    top, bottom, left, right = mix.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return mixed


def mix_labels(mix: Mixup, labels: Tensor, classes: int) -> Tensor:
    """Return the targets (float [n, classes]) of mixed images with these labels (int64 [n]). Each row sums to 1."""
    targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
    return targets * mix.lam + _partners(targets) * (1 - mix.lam)


def _partners(values: Tensor) -> Tensor:
    """Return the rows in the order 1, 0, 3, 2, ... The last row of an odd number keeps its place."""
    paired = len(values) // 2 * 2
    swapped = values[:paired].reshape(-1, 2, *values.shape[1:]).flip(1).flatten(0, 1)
    return torch.cat([swapped, values[paired:]])
