"""Decodes image files, and reads the images of class directories by index.

Runs on ranks, in loader workers and in packers. It imports torch only to decode to tensors, so that packers start
quickly. As in torchvision's ImageFolder, EXIF rotation is ignored, also when images are packed.
"""

import io
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from PIL import Image

from hpc.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")
JpegDecoder = Callable[["Tensor", int], "Tensor"]

_JPEG = b"\xff\xd8\xff"
# A smaller JPEG has too few pixels for a decompression bomb, since 8 x 8 pixels take at least 2 bits.
_HARMLESS_BYTES = 500_000
_RGB = 3  # torchvision.io.ImageReadMode.RGB


def with_image(content: bytes, use: Callable[[Image.Image], _Result]) -> _Result | None:
    """Open an image, pass it to `use` before it is decoded, and return the result; None if the image is not whole."""
    try:
        with Image.open(io.BytesIO(content)) as file:
            return use(file)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # Pillow's decoders may raise any error
        return None


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to three channels of 8 bits."""
    if image.mode.startswith("I;16"):
        # Pillow would clip the values: all but the darkest 256 of 65,536 grays would become white.
        image = image.point(lambda value: value / 256).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def jpeg_decoder() -> JpegDecoder | None:
    """Return torchvision's JPEG decoder, or None if there is none.

    It uses the same library as Pillow and gives the same pixels, but writes directly into the tensor: 1.1 instead of
    1.5 ms for 500 x 375 pixels. torchvision 0.29 warns that its decoder will go. Then Pillow decodes all images.
    """
    try:
        import torch  # noqa: PLC0415  # packers need no torch
        import torchvision.io  # noqa: F401, PLC0415  # takes a second, and registers the operator

        return cast("JpegDecoder", torch.ops.image.decode_jpeg)
    except (ImportError, AttributeError):
        return None


def decode_image(content: bytes, decode_jpeg: JpegDecoder | None) -> "Tensor | None":
    """Return an image as uint8 [h, w, 3], or None if it is corrupt. Pillow decodes images that torchvision refuses."""
    import torch  # noqa: PLC0415  # packers need no torch

    if (
        decode_jpeg is not None
        and content.startswith(_JPEG)
        # torchvision's decoder lacks Pillow's check for decompression bombs.
        and (len(content) < _HARMLESS_BYTES or with_image(content, lambda image: image.size) is not None)
    ):
        with suppress(RuntimeError):
            return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), _RGB).permute(1, 2, 0)
    array = with_image(content, lambda file: np.array(as_rgb(file)))
    return None if array is None else torch.from_numpy(array)


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """The images of class directories."""

    root: Path
    names: np.ndarray
    """Paths below `root`, bytes [n]. An array, since loader workers would copy the pages of a list."""
    decode_jpeg: JpegDecoder | None = field(default_factory=jpeg_decoder)
    """JPEG decoder, found once before loader workers are forked; None if Pillow decodes all images."""

    def read(self, index: int) -> "Tensor | None":
        """Return the image (uint8 [h, w, 3]), or None if the file holds no whole image.

        Raises:
            UserError: this node cannot read the file, although the image may be whole.
        """
        path = self._path(index)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): copy the data there again, "
                "or exclude that node"
            ) from error
        return decode_image(content, self.decode_jpeg)

    def name(self, index: int) -> str:
        """Return the image's path."""
        return str(self._path(index))

    def fix(self) -> str:
        """Return an instruction for the user if many images are corrupt."""
        return "copy the data again"

    def identity(self) -> bytes:
        """Return the images' paths as bytes."""
        return self.names.tobytes()

    def part(self, indices: "Tensor") -> "FolderImages":
        """Return a store of the images with these indices."""
        return replace(self, names=self.names[indices.numpy()])

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])
