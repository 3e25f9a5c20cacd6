"""Chooses the box to crop from an image, and resizes the crop. Runs on ranks, loader workers and packers.

Only `crop_and_resize` imports torch. Packers use the boxes alone, and start without torch.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.config.train_config import Interpolation

if TYPE_CHECKING:
    from torch import Tensor

CropBox = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""

_TRIES = 10
RANDOM_NUMBERS = 2 + 2 * _TRIES
"""Largest number of random numbers that a random box takes."""


def center_box(height: int, width: int, crop_pct: float = 1.0) -> CropBox:
    """Return the square in the middle whose side is the share `crop_pct` of the image's shorter side."""
    side = max(1, round(min(height, width) * crop_pct))
    return (height - side) // 2, (width - side) // 2, side, side


def random_box(
    numbers: Iterator[float], height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> CropBox:
    """Return a box of random place, area and shape, as torchvision's RandomResizedCrop does.

    It takes at most RANDOM_NUMBERS of `numbers`, which are in [0, 1). `area` is the least and the greatest area of the
    box, as shares of the image; `ratio` is its least and its greatest width / height.
    """
    down, across = next(numbers), next(numbers)
    shortest, longest = map(math.log, ratio)
    for _ in range(_TRIES):
        pixels = height * width * (area[0] + next(numbers) * (area[1] - area[0]))
        shape = math.exp(shortest + next(numbers) * (longest - shortest))
        high, wide = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < high <= height and 0 < wide <= width:
            break
    else:
        high, wide = (max(1, round(side)) for side in (min(height, width / ratio[0]), min(width, height * ratio[1])))
        down = across = 1 / 2
    return int(down * (height - high + 1)), int(across * (width - wide + 1)), high, wide


def crop_and_resize(
    image: "Tensor", box: CropBox, size: tuple[int, int], interpolation: Interpolation = "bilinear"
) -> "Tensor":
    """Crop the box of an image (uint8 [h, w, c]), and resize it to uint8 [c, *size].

    Interleaved channels, [h, w, c], take two thirds of the time of separate planes.
    """
    from torch.nn import functional  # noqa: PLC0415  # packers do without torch

    top, left, height, width = box
    part = image[top : top + height, left : left + width].permute(2, 0, 1)
    if (height, width) == size:
        return part
    return functional.interpolate(part[None], size, mode=interpolation, antialias=True)[0]


def center_crop(image: "Tensor", size: tuple[int, int], crop_pct: float, interpolation: Interpolation) -> "Tensor":
    """Crop the `center_box` of an image (uint8 [h, w, c]), and resize it to uint8 [c, *size]."""
    return crop_and_resize(image, center_box(image.shape[0], image.shape[1], crop_pct), size, interpolation)
