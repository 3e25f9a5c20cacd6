"""Mixup and cutmix: each image is mixed with its neighbour in the batch. Runs on every rank, on its device.

How to mix is a function of (seed, step), whom to mix with one of the place in the global batch (0 with 1, 2 with 3,
..., whose images are random neighbours in the order of the epoch), so neither depends on the number of ranks: pairs
are never torn apart (`BatchSchedule.samples_per_group`). The last image of an odd batch stays as it is.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.runtime.counter_rng import Purpose, derive_key


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """How the images of a step are mixed."""

    lam: float
    """The image's own part in its label; the neighbour has the rest."""
    box: tuple[int, int, int, int] | None
    """Cutmix: top, bottom, left and right of the neighbour's part in pixels; None: mixup."""


def draw_mix(config: TrainConfig, step: int, size: int) -> Mixup | None:
    """How to mix in the step after `step` steps, images of `size` pixels; None: not at all.

    Mixup: Zhang et al., "mixup: Beyond empirical risk minimization" (2018). Cutmix: Yun et al., "CutMix" (2019). With
    both, half of the steps use either.
    """
    if not config.mixup and not config.cutmix:
        return None
    random = np.random.Generator(np.random.Philox(derive_key(config.seed, Purpose.MIX, step)))
    if config.mixup and (not config.cutmix or random.random() < 0.5):
        return Mixup(lam=random.beta(config.mixup, config.mixup), box=None)
    return _cut(random, random.beta(config.cutmix, config.cutmix), size)


def _cut(random: np.random.Generator, lam: float, size: int) -> Mixup:
    """A square of the area that is not the image's own, around any pixel; what lies outside does not count."""
    half = size * math.sqrt(1 - lam) / 2
    row, column = random.integers(0, size, 2)
    top, bottom = (int(min(max(edge, 0), size)) for edge in (row - half, row + half))
    left, right = (int(min(max(edge, 0), size)) for edge in (column - half, column + half))
    return Mixup(lam=1 - (bottom - top) * (right - left) / size**2, box=(top, bottom, left, right))


def mix_images(mix: Mixup, images: Tensor) -> Tensor:
    """Mix images (float [n, C, H, W]) that begin at an even place of the batch."""
    neighbours = _swapped(images)
    if mix.box is None:
        return images * mix.lam + neighbours * (1 - mix.lam)
    top, bottom, left, right = mix.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[:, :, top:bottom, left:right] = neighbours[:, :, top:bottom, left:right]
    return mixed


def mix_labels(mix: Mixup, labels: Tensor, classes: int) -> Tensor:
    """How much of each class is in the mixed images of these labels: int64 [n] to float [n, classes].

    Each row adds up to 1.
    """
    targets = functional.one_hot(labels, classes).float()
    return targets * mix.lam + _swapped(targets) * (1 - mix.lam)


def _swapped(values: Tensor) -> Tensor:
    """Each row's neighbour: 1, 0, 3, 2, ...; the last of an odd number is its own."""
    paired = len(values) // 2 * 2
    swapped = values[:paired].reshape(-1, 2, *values.shape[1:]).flip(1).flatten(0, 1)
    return torch.cat([swapped, values[paired:]])
