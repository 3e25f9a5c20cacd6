"""Fills a random rectangle of an image with the mean color. Runs on every rank and in its loader workers.

The rectangles of a batch are drawn at once on the CPU, by operations that IEEE 754 rounds alike everywhere, and filled
on the device of the images. Needs no torchvision.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.loader import to_device
from training.runtime.counter_rng import Purpose, derive_key, uniform

# Zhong et al., "Random erasing data augmentation" (2017), with torchvision's settings: the least and the greatest area,
# as shares of the image, and the least and the greatest height / width.
_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)
_TRIES = 10
# Number of draws per image: whether to erase, row, column, and an area and a ratio for each try.
_DRAWS = 3 + 2 * _TRIES
# The last bit of exp() may depend on how many values are computed at once; a table always has the same bits.
_STEPS = 4096
_LOG_RATIO = tuple(map(math.log, _RATIO))
_ROOTS = torch.tensor(
    [math.exp((_LOG_RATIO[0] + (step + 0.5) / _STEPS * (_LOG_RATIO[1] - _LOG_RATIO[0])) / 2) for step in range(_STEPS)],
    dtype=torch.float64,
)


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Erases random rectangles of images."""

    seed: int
    probability: float
    color: tuple[int, ...]
    """Color that fills the rectangles, a byte per channel."""

    def batch(self, epoch: int, indices: Tensor, images: Tensor) -> Tensor:
        """Return images (uint8 [n, C, H, W]) with erased rectangles. `indices` (int64 [n]) must be on the CPU."""
        boxes = self.boxes(epoch, indices, *images.shape[2:])
        color = torch.tensor(self.color, dtype=torch.uint8)
        if images.device.type == "cpu":
            return fill_each(images, boxes, color)
        return fill_all(images, to_device(boxes, images.device), to_device(color, images.device))

    def boxes(self, epoch: int, indices: Tensor, height: int, width: int) -> Tensor:
        """Return top, left, height and width (int64 [n, 4]) of random rectangles. Height 0 means to erase nothing."""
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
    """Return images (uint8 [n, C, H, W]) with filled boxes (int64 [n, 4]). Fills one by one, which is fast on a CPU."""
    filled = images.clone()
    for place in boxes[:, 2].nonzero()[:, 0].tolist():
        top, left, high, wide = boxes[place].tolist()
        filled[place, :, top : top + high, left : left + wide] = color[:, None, None]
    return filled


def fill_all(images: Tensor, boxes: Tensor, color: Tensor) -> Tensor:
    """Return what `fill_each` returns, by a few operations on all images, so that the host need not wait for a GPU."""
    height, width = images.shape[2:]
    top, left, high, wide = boxes.unbind(1)
    inside = _within(top, high, height)[:, None, :, None] & _within(left, wide, width)[:, None, None, :]
    return torch.where(inside, color[:, None, None], images)


def _within(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Return bool [n, size] that is true, in each row, at the `length` positions from `first` on."""
    places = torch.arange(size, device=first.device)
    return (places >= first[:, None]) & (places < (first + length)[:, None])
