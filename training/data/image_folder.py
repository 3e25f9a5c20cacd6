"""Decodes image files, and reads the images of class directories by index.

Runs on ranks, in loader workers and in packers. It imports torch only to decode to tensors, so that packers start
quickly. As in torchvision's ImageFolder, EXIF rotation is ignored, also when images are packed.
"""

import io
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import simplejpeg
from PIL import Image, TiffImagePlugin

from hpc.base.errors import UserError
from hpc.base.text import file_name
from training.data.transforms.crop import CenterCrop, Crop

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")

_JPEG = b"\xff\xd8\xff"
# The marker of a lossless frame, which may also be in metadata. If simplejpeg 1.9.0 reduces such an image, it writes
# beyond its memory, by a defect of its libjpeg-turbo, 3.1.2.
_LOSSLESS = b"\xff\xc3"
_WHITE = 65535


def with_image(content: bytes, use: Callable[[Image.Image], _Result]) -> _Result | None:
    """Open an image, pass it to `use` before it is decoded, and return the result; None if the image is not whole.

    Raises UserError if the image's gray levels are unknown.
    """
    try:
        with Image.open(io.BytesIO(content)) as file:
            return use(file)
    except (MemoryError, UserError):
        raise
    except Exception:  # noqa: BLE001  # Pillow's decoders may raise any error
        return None


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to three channels of 8 bits. Raises UserError if the image's gray levels are unknown."""
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        # Of gray values of more than 8 bits, Pillow would clip all but the darkest 256 of 65,536 to white.
        image = Image.fromarray(_gray_levels(image))
    return image if image.mode == "RGB" else image.convert("RGB")


def _gray_levels(image: Image.Image) -> np.ndarray:
    """Return the levels (uint8 [h, w]) of gray values of more than 8 bits: the highest 8 bits of their range.

    The range does not depend on the values, so that dark images stay dark. 16 bits are the range of files of 16 bits,
    and to these Pillow scales the values of a PGM file.
    """
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    low, high = values.min(), values.max()
    bits = 16
    if image.mode.startswith("I;16"):
        bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (bits,))[0]  # in a TIFF also 12
    elif not low >= 0 or high > (1 if image.mode == "F" else _WHITE):
        raise UserError(
            f"its gray values are {low:g} to {high:g}, and white is unknown: save it with whole numbers from 0 to "
            f"{_WHITE}, or with fractions from 0 to 1"
        )
    elif image.mode == "I" and image.format == "TIFF" and high <= _WHITE >> 8:
        bits = 8  # as other programs save arrays of 8 bits that they have read as integers
    levels = np.round(values * 255) if image.mode == "F" else values >> (bits - 8)
    # Pillow inverts other TIFF files in which 0 is white.
    inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    return (255 - levels if inverted else levels).astype(np.uint8)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path of an image before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file_name(str(path))}: {error}") from error


def decode_image(content: bytes, crop: Crop | CenterCrop) -> "Tensor | None":
    """Decode an image and return its crop (uint8 [3, *crop.size]), or None if the image is corrupt.

    Raises UserError if the image's gray levels are unknown.

    simplejpeg uses the same library as Pillow and gives the same pixels, but is faster: 1.25 instead of 1.7 ms for 500
    x 375 pixels. It can decode to a half of the sides or less: a half, a quarter or an eighth in 1.07, 0.99 or 0.83 ms.
    """
    import torch  # noqa: PLC0415  # packers need no torch

    if content.startswith(_JPEG) and (jpeg := _decode_jpeg(content, crop)) is not None:
        array, whole = jpeg
        return crop.of(torch.from_numpy(array), whole)
    pixels = with_image(content, lambda file: np.array(as_rgb(file)))
    return None if pixels is None else crop.of(torch.from_numpy(pixels))


def _decode_jpeg(content: bytes, crop: Crop | CenterCrop) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Return the pixels, uint8 [h, w, 3], perhaps of the reduced image, and the size of the whole image.

    Returns None if Pillow is to decode the image.
    """
    if _LOSSLESS in content:
        return None
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(content)
        # Pillow converts CMYK differently, and looks for decompression bombs.
        if color_space not in {"YCbCr", "Gray"} or height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        high, wide = crop.enough_of(height, width)
        # A factor below 2 takes longer than the whole image.
        return simplejpeg.decode_jpeg(content, min_height=high, min_width=wide, min_factor=2), (height, width)
    except (ValueError, KeyError):  # KeyError: simplejpeg does not know the subsampling, such as 4:4:1
        return None


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """The images of class directories."""

    root: Path
    names: np.ndarray
    """Paths below `root`, bytes [n]. An array, since loader workers would copy the pages of a list."""

    def read(self, index: int, crop: Crop | CenterCrop) -> "Tensor | None":
        """Return the crop of an image (uint8 [3, *crop.size]), or None if the file holds no whole image.

        Raises UserError if this node cannot read the file, although the image may be whole, or its gray levels are
        unknown.
        """
        path = self.path(index)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): copy the data there again, "
                "or exclude that node"
            ) from error
        with naming(path):
            return decode_image(content, crop)

    def name(self, index: int) -> str:
        """Return the image's path."""
        return file_name(str(self.path(index)))

    def fix(self) -> str:
        """Return an instruction for the user if many images are corrupt."""
        return "copy the data again; if they are whole, convert them to PNG or JPEG"

    def identity(self) -> bytes:
        """Return the images' paths as bytes."""
        return self.names.tobytes()

    def part(self, indices: "Tensor") -> "FolderImages":
        """Return a store of the images with these indices."""
        return replace(self, names=self.names[indices.numpy()])

    def path(self, index: int) -> Path:
        """Return the image's path, also if it is no text."""
        return self.root / os.fsdecode(self.names[index])
