"""Which part of an image is looked at. Pure; runs on every rank, in loader workers and packers; imports no torch."""

import math
from collections.abc import Iterator

CropBox = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""

# Szegedy et al., "Going deeper with convolutions" (2015): width by height.
_RATIOS = 3 / 4, 4 / 3
_TRIES = 10
RANDOM_NUMBERS = 2 + 2 * _TRIES
"""As many does a random box take at most."""


def center_box(height: int, width: int, part: float = 1.0) -> CropBox:
    """The square in the middle whose side is a part of the shorter side."""
    side = max(1, round(min(height, width) * part))
    return (height - side) // 2, (width - side) // 2, side, side


def random_box(numbers: Iterator[float], height: int, width: int, area: tuple[float, float]) -> CropBox:
    """A part of any place, of an area and of a shape that are random: that of torchvision's RandomResizedCrop.

    Args:
        numbers: from [0, 1); so many as are needed are taken, RANDOM_NUMBERS at most.
        height: of the image.
        width: of the image.
        area: the least and the greatest, as parts of the image.
    """
    down, across = next(numbers), next(numbers)
    shortest, longest = map(math.log, _RATIOS)
    for _ in range(_TRIES):
        pixels = height * width * (area[0] + next(numbers) * (area[1] - area[0]))
        ratio = math.exp(shortest + next(numbers) * (longest - shortest))
        high, wide = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < high <= height and 0 < wide <= width:
            break
    else:
        high, wide = min(height, round(width / _RATIOS[0])), min(width, round(height * _RATIOS[1]))
        down = across = 1 / 2
    return int(down * (height - high + 1)), int(across * (width - wide + 1)), high, wide
