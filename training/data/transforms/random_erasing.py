"""Random erasing: a rectangle of an image becomes the mean color. Runs on every rank and in its loader workers.

Which one is drawn on the CPU, for all images of a batch at once, by operations that round as IEEE 754 says: the same
everywhere. It is filled wherever the images are. Needs no torchvision.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.loader import to_device
from training.runtime.counter_rng import Purpose, derive_key, uniform

# Zhong et al., "Random erasing data augmentation" (2017), as torchvision has it: the least and the greatest area, as
# parts of the image, and height by width.
_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)
_TRIES = 10
# The random numbers that one image may take: whether, row, column, and an area and a ratio for each try.
_DRAWS = 3 + 2 * _TRIES
# The last bit of an exponential may depend on how many are computed at once: that of a table does not.
_STEPS = 4096
_LOG_RATIO = tuple(map(math.log, _RATIO))
_ROOTS = torch.tensor(
    [math.exp((_LOG_RATIO[0] + (step + 0.5) / _STEPS * (_LOG_RATIO[1] - _LOG_RATIO[0])) / 2) for step in range(_STEPS)],
    dtype=torch.float64,
)


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Which images lose a rectangle, and what stands there instead."""

    seed: int
    probability: float
    color: tuple[int, ...]
    """A byte for each channel."""

    def batch(self, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
        """The images (uint8 [n, C, H, W], on any device) with these indices (int64 [n], on the CPU) in an epoch."""
        boxes, color = self.boxes(epoch, indices, *images.shape[2:]), torch.tensor(self.color, dtype=torch.uint8)
        if images.device.type == "cpu":
            return fill_each(images, boxes, color)
        return fill_all(images, to_device(boxes, images.device), to_device(color, images.device))

    def boxes(self, epoch: int, indices: Tensor, height: int, width: int) -> Tensor:
        """Top, left, height and width (int64 [n, 4]) of what images of this size lose; of no height: nothing."""
        key = derive_key(self.seed, Purpose.ERASE, epoch)
        drawn = uniform(key, indices[:, None] * _DRAWS + torch.arange(_DRAWS)).double()
        areas, ratios = drawn[:, 3::2], drawn[:, 4::2]
        side = (height * width * (_AREA[0] + areas * (_AREA[1] - _AREA[0]))).sqrt()
        root = _ROOTS[(ratios * _STEPS).long()]
        highs, wides = (side * root).round().long(), (side / root).round().long()
        fits = (highs < height) & (wides < width)
        first = fits.int().argmax(1, keepdim=True)
        erased = (drawn[:, 0] < self.probability) & fits.any(1)
        high, wide = highs.gather(1, first)[:, 0] * erased, wides.gather(1, first)[:, 0]
        top, left = (drawn[:, 1] * (height - high + 1)).long(), (drawn[:, 2] * (width - wide + 1)).long()
        return torch.stack([top, left, high, wide], dim=1)


def fill_each(images: Tensor, boxes: Tensor, color: Tensor) -> Tensor:
    """Images (uint8 [n, C, H, W]) with their boxes (int64 [n, 4]) filled: a CPU is fastest if it looks at no others."""
    filled = images.clone()
    for place in boxes[:, 2].nonzero()[:, 0].tolist():
        top, left, high, wide = boxes[place].tolist()
        filled[place, :, top : top + high, left : left + wide] = color[:, None, None]
    return filled


def fill_all(images: Tensor, boxes: Tensor, color: Tensor) -> Tensor:
    """The same in a few operations, and without any that a GPU is to be waited for."""
    height, width = images.shape[2:]
    top, left, high, wide = boxes.unbind(1)
    inside = _within(top, high, height)[:, None, :, None] & _within(left, wide, width)[:, None, None, :]
    return torch.where(inside, color[:, None, None], images)


def _within(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Which places of `size` (bool [n, size]) are among the `length` ones from `first` on."""
    places = torch.arange(size, device=first.device)
    return (places >= first[:, None]) & (places < (first + length)[:, None])
