"""Parts of images, scaled to squares. Runs on every rank and in its loader workers; needs no torchvision."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from training.data.to_device import to_device
from training.data.transforms.crop_box import CropBox, center_box

# Side of the square that evaluations crop, as a part of an image's shorter side: the usual 224 of 256 pixels.
EVALUATION_CROP = 224 / 256


def crop_and_resize(image: Tensor, box: CropBox, size: int | tuple[int, int]) -> Tensor:
    """The part of an image (uint8 [h, w, c]) in a box, scaled to uint8 [c, size, size], or [c, *size].

    Pixels whose channels lie together take two thirds of the time of separate channels.
    """
    top, left, height, width = box
    part = image[top : top + height, left : left + width].permute(2, 0, 1)
    wanted = _pair(size)
    if (height, width) == wanted:
        return part
    return functional.interpolate(part[None], wanted, mode="bilinear", antialias=True)[0]


def center_crop(image: Tensor, size: int | tuple[int, int], crop_pct: float = EVALUATION_CROP) -> Tensor:
    """The middle of an image (uint8 [h, w, c]) as evaluations crop it, scaled to uint8 [c, size, size], or [c, *size].

    `crop_pct` is the side of the square as a part of the image's shorter side.
    """
    return crop_and_resize(image, center_box(image.shape[0], image.shape[1], crop_pct), size)


def cut_all(images: Tensor, boxes: Tensor, size: int | tuple[int, int]) -> Tensor:
    """The same of many: of each image (uint8 [n, c, h, w], on any device) the part in its box.

    Args:
        images: of one size.
        boxes: int64 [n, 4], on the CPU: a `Box` for each.
        size: of the result, uint8 [n, c, size, size] or [n, c, *size].

    A GPU has no such scaling of bytes: there it is done by `scale`, with the same result in every bit.
    """
    height, width = _pair(size)
    if images.device.type == "cpu":
        cuts = [
            crop_and_resize(image.permute(1, 2, 0), tuple(box), size)
            for image, box in zip(images, boxes.tolist(), strict=True)
        ]
        return torch.stack(cuts) if cuts else images.new_empty(0, images.shape[1], height, width)
    top, left, high, wide = to_device(boxes, images.device).unbind(1)
    return scale(scale(images, 3, left, wide, width), 2, top, high, height)


def empty_squares(count: int, size: int) -> Tensor:
    """Place for uint8 [count, 3, size, size], the channels of a pixel together as they come and as models like it."""
    return torch.empty(count, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


# Weights have as many bits after the point as the largest of them lets fit into 15 bits, 22 at most: torch's choice.
_MOST_WEIGHT, _LEAST_BITS, _MOST_BITS = 2**15 - 0.5, 14, 22


def scale(images: Tensor, dim: int, first: Tensor, length: Tensor, size: int) -> Tensor:
    """Stretches of one dimension of images, scaled to `size` by bilinear interpolation with antialiasing.

    It is the arithmetic of torch's own scaling of bytes on the CPU, which is Pillow's: weights as float64 that are made
    whole numbers, and sums of whole numbers. So the result is that of `interpolate` in every bit, on any device.

    Args:
        images: uint8 [n, c, h, w]
        dim: 2 for the rows, 3 for the columns.
        first: int64 [n]: where each image's stretch begins.
        length: int64 [n]: how long it is.
        size: of the dimension in the result.
    """
    start, weights, bits = _weights(length, size, images.shape[dim])
    shape = [len(images), *(size if each == dim else 1 for each in (1, 2, 3))]
    total = (1 << (bits - 1)).view(-1, 1, 1, 1)
    for tap in range(weights.shape[2]):
        places = (first[:, None] + start + tap).clamp(max=images.shape[dim] - 1).view(shape)
        wanted = [*images.shape]
        wanted[dim] = size
        pixels = images.gather(dim, places.expand(wanted))
        total = total + pixels * weights[:, :, tap].view(shape)
    return (total >> bits.view(-1, 1, 1, 1)).clamp(max=255).to(torch.uint8)


def _weights(length: Tensor, size: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """What stretches are scaled with.

    Returns:
        For each place of the result (int64 [n, size]) the first one of the stretch that counts; the weights (int32
        [n, size, taps]) of that one and those after it; and (int32 [n]) how many of their bits are after the point.
    """
    ratio = length.double() / size
    reach = ratio.clamp(min=1)[:, None]
    center = ratio[:, None] * (torch.arange(size, device=length.device) + 0.5)
    start = (center - reach + 0.5).long().clamp(min=0)
    end = torch.minimum((center + reach + 0.5).long(), length[:, None])
    taps = 2 * math.ceil(max(1.0, longest / size)) + 1
    places = start[..., None] + torch.arange(taps, device=length.device)
    weights = (1 - ((places - center[..., None] + 0.5) * (1 / reach)[..., None]).abs()).clamp(min=0)
    weights = weights * (places < end[..., None])
    # Added up one after the other: a sum in another order may differ in its last bit.
    weights = weights / sum(weights.unbind(2))[..., None]  # type: ignore[index]  # there is at least one
    steps = torch.arange(_LEAST_BITS, _MOST_BITS, device=length.device)
    bits = _LEAST_BITS + (weights.amax((1, 2))[:, None] * (2 << steps) < _MOST_WEIGHT).sum(1)
    whole = (weights * (1 << bits)[:, None, None] + 0.5).int()
    return start, whole, bits.int()
