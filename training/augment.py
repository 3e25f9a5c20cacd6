"""Augmentation as a function of (seed, epoch, index of the image): the same whoever computes it, and whenever.

Runs on every rank and in its loader workers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.counted import Purpose, below, stream, uniform

# The random numbers that one image may use in one epoch.
_DRAWS = 32
_ROW, _COLUMN, _FLIP, _TRIES = 0, 1, 2, 8

# Random resized crops: Szegedy et al., "Going deeper with convolutions" (2015), with the larger least area that short
# trainings do better with.
_AREA = (0.25, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_MOST_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which augmentations to apply."""

    seed: int
    crop: bool
    flip: bool

    def key(self, epoch: int) -> int:
        """The stream of an epoch."""
        return stream(self.seed, Purpose.AUGMENTATION, epoch)

    def flips(self, epoch: int, indices: Tensor) -> Tensor:
        """Which images to mirror: bool [n]."""
        return below(self.key(epoch), indices * _DRAWS + _FLIP, 2).bool() & self.flip


def augment_batch(augmentation: Augmentation, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
    """Shift images by a twenty-eighth of their side at most (one pixel of 28) and mirror half of them.

    Args:
        augmentation: what to apply.
        epoch: the epoch that the augmentation belongs to.
        indices: int64 [n], the images' places in the training set.
        images: [n, C, H, W].

    Returns:
        [n, C, H, W], like `images`.
    """
    if augmentation.crop:
        images = _shift(images, augmentation.key(epoch), indices)
    if augmentation.flip:
        mirrored = augmentation.flips(epoch, indices)
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images


def _shift(images: Tensor, key: int, indices: Tensor) -> Tensor:
    """Pad with zeros and cut a random window of the old size out of each image."""
    count, _, height, width = images.shape
    padding = max(1, round(min(height, width) / 28))
    padded = functional.pad(images, (padding,) * 4)
    top = below(key, indices * _DRAWS + _ROW, 2 * padding + 1)
    left = below(key, indices * _DRAWS + _COLUMN, 2 * padding + 1)
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    # Advanced indices around a slice put the sliced dimension last.
    window = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return window.permute(0, 3, 1, 2)


Box = tuple[float, float, float, float]


def random_resized_crop(augmentation: Augmentation, epoch: int, index: int, width: int, height: int) -> Box:
    """The part (left, top, right, bottom) of an image of the training set that is to be scaled to the input size."""
    draws = uniform(augmentation.key(epoch), index * _DRAWS + torch.arange(_DRAWS)).tolist()
    for attempt in range(_MOST_TRIES):
        area_draw, aspect_draw = draws[_TRIES + 2 * attempt : _TRIES + 2 * attempt + 2]
        area = width * height * (_AREA[0] + area_draw * (_AREA[1] - _AREA[0]))
        aspect = math.exp(math.log(_ASPECT[0]) + aspect_draw * math.log(_ASPECT[1] / _ASPECT[0]))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(draws[_COLUMN] * (width - crop_width + 1))
            top = int(draws[_ROW] * (height - crop_height + 1))
            return (left, top, left + crop_width, top + crop_height)
    return center_crop(width, height, 1.0)


def center_crop(width: int, height: int, part: float) -> Box:
    """The square in the middle whose side is `part` of the shorter side."""
    side = min(width, height) * part
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)
