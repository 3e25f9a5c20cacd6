"""Chooses the box to crop from an image, and resizes the crop. Runs on ranks, loader workers and packers.

Only `of` imports torch. Packers use the boxes alone, and start without torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from training.config.train_config import Interpolation

if TYPE_CHECKING:
    from torch import Tensor

CropBox = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_TRIES = 10
_RATIO = 3 / 4, 4 / 3  # least and greatest width / height of a random box: torchvision's
RANDOM_NUMBERS = 2 + 2 * _TRIES
"""Largest number of random numbers that a random box takes."""
# Each side of a crop keeps at least twice the pixels to which it is resized, as with Pillow's `thumbnail`. The result
# then differs from that of the whole image about as much as bilinear interpolation does from bicubic.
_MARGIN = 2


def center_box(height: int, width: int) -> CropBox:
    """Return the largest square in the middle of an image."""
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def random_box(numbers: Iterator[float], height: int, width: int, area: tuple[float, float]) -> CropBox:
    """Return a box of random place, area and shape, as torchvision's RandomResizedCrop does.

    It takes at most RANDOM_NUMBERS of `numbers`, which are in [0, 1). `area` is the least and the greatest area of the
    box, as shares of the image.
    """
    down, across = next(numbers), next(numbers)
    shortest, longest = map(math.log, _RATIO)
    for _ in range(_TRIES):
        pixels = height * width * (area[0] + next(numbers) * (area[1] - area[0]))
        shape = math.exp(shortest + next(numbers) * (longest - shortest))
        high, wide = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < high <= height and 0 < wide <= width:
            break
    else:
        high, wide = (max(1, round(side)) for side in (min(height, width / _RATIO[0]), min(width, height * _RATIO[1])))
        down = across = 1 / 2
    return int(down * (height - high + 1)), int(across * (width - wide + 1)), high, wide


@dataclass(frozen=True, kw_only=True)
class Crop:
    """The part of an image that a training shows, and its size."""

    box: Callable[[int, int], CropBox]
    """Chooses the box of an image with this height and width."""
    size: tuple[int, int]
    """Height and width to which the box is resized."""
    interpolation: Interpolation = "bilinear"
    mirrored: bool = False

    def enough_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the least height and width to which an image of this size may be reduced before it is cropped."""
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


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The part of an image that an evaluation shows: bit by bit that of torchvision's presets for pretrained weights.

    The image is resized by Pillow, and so that its middle, of `size`, has a share of `crop_pct` of the shorter side.
    torch resizes in a third of the time, but its pixels differ by up to 2 of 255.
    """

    size: tuple[int, int]
    """Height and width of the result."""
    crop_pct: float = 1.0
    interpolation: Interpolation = "bilinear"

    def enough_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the image's own height and width: it may not be reduced."""
        return height, width

    def of(self, image: "Tensor", _whole: tuple[int, int] | None = None) -> "Tensor":
        """Resize an image (uint8 [h, w, c]), and crop it to uint8 [c, *size]."""
        import torch  # noqa: PLC0415  # packers do without torch

        height, width = self._resized(*image.shape[:2])
        if (height, width) != image.shape[:2]:
            pixels = image.squeeze(2) if image.shape[2] == 1 else image
            resized = Image.fromarray(pixels.numpy()).resize((width, height), _RESAMPLING[self.interpolation])
            image = torch.from_numpy(np.array(resized)).view(height, width, -1)
        top, left = (round((side - wanted) / 2) for side, wanted in zip((height, width), self.size, strict=True))
        return image[top : top + self.size[0], left : left + self.size[1]].permute(2, 0, 1)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if (height, width) == self.size and self.crop_pct == 1:
            return height, width
        # The floating-point quotient of 224 and 224 / 232 is a little less than 232.
        short = int(max(self.size) / self.crop_pct + 1e-6)
        # torchvision rounds the longer side down, too.
        return (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
