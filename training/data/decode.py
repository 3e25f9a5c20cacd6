"""Image files as pixels: which files are images, and what their pixels are. Runs on ranks, loader workers and packers.

Imports no torch, so that a packer starts quickly. A rotation that EXIF asks for is not carried out, as in torchvision's
ImageFolder: what a data set is trained with must not depend on whether it is packed.
"""

import io
from collections.abc import Callable
from typing import TypeVar

from PIL import Image

_Pixels = TypeVar("_Pixels")


def with_image(content: bytes, use: Callable[[Image.Image], _Pixels]) -> _Pixels | None:
    """What `use` makes of an image that is not loaded yet, or None if the content is no whole image."""
    try:
        with Image.open(io.BytesIO(content)) as file:
            return use(file)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # Pillow's decoders raise nearly everything on broken files
        return None


def as_rgb(image: Image.Image) -> Image.Image:
    """The image with three channels of 8 bits."""
    if image.mode.startswith("I;16"):
        # Pillow would clip: all but the darkest 256 of 65,536 grays would become white.
        image = image.point(lambda value: value / 256).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")
