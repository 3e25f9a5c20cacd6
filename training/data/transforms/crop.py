"""Chooses the box to crop from an image, and resizes the crop. Runs on ranks, loader workers and packers.

Only `Crop.of` imports torch. Packers use the boxes alone, and start without torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from training.config.train_config import Interpolation

if TYPE_CHECKING:
    from torch import Tensor

CropBox = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""

_TRIES = 10
RANDOM_NUMBERS = 2 + 2 * _TRIES
"""Largest number of random numbers that a random box takes."""
# Each side of a crop keeps at least twice the pixels to which it is resized, as with Pillow's `thumbnail`. The result
# then differs from that of the whole image about as much as bilinear interpolation does from bicubic.
_MARGIN = 2


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


@dataclass(frozen=True, kw_only=True)
class Crop:
    """The part of an image that a model sees, and its size."""

    box: Callable[[int, int], CropBox]
    """Chooses the box of an image with this height and width."""
    size: tuple[int, int]
    """Height and width to which the box is resized."""
    interpolation: Interpolation = "bilinear"
    mirrored: bool = False
    may_be_reduced: bool = False
    """Whether the image may be decoded to fewer pixels: in a training, but not in an evaluation."""

    def enough_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the least height and width to which an image of this size may be reduced before it is cropped."""
        if not self.may_be_reduced:
            return height, width
        _, _, high, wide = self.box(height, width)
        share = min(1.0, _MARGIN * max(self.size[0] / high, self.size[1] / wide))
        return math.ceil(share * height), math.ceil(share * width)

    def of(self, image: "Tensor", whole: tuple[int, int] | None = None) -> "Tensor":
        """Crop an image (uint8 [h, w, c]), and resize it to uint8 [c, *size].

        `whole` is the size of an image that was reduced. Interleaved channels, [h, w, c], take two thirds of the time
        of separate planes.
        """
        from torch.nn import functional  # noqa: PLC0415  # packers do without torch

        present = image.shape[0], image.shape[1]
        top, left, height, width = _reduced(self.box(*whole), whole, present) if whole else self.box(*present)
        part = image[top : top + height, left : left + width].permute(2, 0, 1)
        if (height, width) != self.size:
            part = functional.interpolate(part[None], self.size, mode=self.interpolation, antialias=True)[0]
        return part.flip(2) if self.mirrored else part


def _reduced(box: CropBox, whole: tuple[int, int], present: tuple[int, int]) -> CropBox:
    """Return the box of an image on its reduced form."""
    down, across = (now / before for now, before in zip(present, whole, strict=True))
    top, left = round(box[0] * down), round(box[1] * across)
    return top, left, max(1, round((box[0] + box[2]) * down) - top), max(1, round((box[1] + box[3]) * across) - left)


def center_crop(size: tuple[int, int], crop_pct: float, interpolation: Interpolation) -> Crop:
    """Return the crop of an evaluation: the `center_box`, resized."""
    return Crop(box=partial(center_box, crop_pct=crop_pct), size=size, interpolation=interpolation)
