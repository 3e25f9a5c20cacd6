"""Image folders: images of class directories, decoded when they are asked for.

Runs on every rank and in its loader workers.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.data.decode import as_rgb, with_image

_JPEG = b"\xff\xd8\xff"
# Fewer bytes cannot hold so many pixels that Pillow would refuse them as a decompression bomb: 2 bits for each 8 x 8.
_HARMLESS_BYTES = 500_000
_RGB = 3  # torchvision.io.ImageReadMode.RGB
_Decoder = Callable[[Tensor, int], Tensor]


def jpeg_decoder() -> _Decoder | None:
    """Torchvision's decoder of JPEGs, if it has one.

    It is the same library as Pillow's, with the same pixels, but writes into the tensor itself: 1.1 instead of 1.5 ms
    for 500 x 375 pixels. Its Python function warns that it will be removed (0.29); from then on Pillow decodes all.
    """
    try:
        import torchvision.io  # noqa: F401, PLC0415  # takes a second, and registers the operator

        return cast("_Decoder", torch.ops.image.decode_jpeg)
    except (ImportError, AttributeError):
        return None


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """The images of class directories."""

    root: Path
    names: np.ndarray
    """Paths below `root` as bytes [n]: one array, for workers that touch a list of strings copy its pages."""
    decode_jpeg: _Decoder | None = field(default_factory=jpeg_decoder)
    """Found here once, before loader workers are forked; None: Pillow decodes all."""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Tensor | None:
        """The image, or None if the file holds no whole image.

        Raises:
            UserError: the file cannot be read, which is a matter of this node and no property of the image.
        """
        path = self._path(index)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read on {socket.gethostname()} ({error.strerror}): copy the data there again, "
                "or leave that node out"
            ) from error
        return decode_image(content, self.decode_jpeg)

    def name(self, index: int) -> str:
        """The image's path."""
        return str(self._path(index))

    def fix(self) -> str:
        """Where whole images come from."""
        return "copy the data again"

    def identity(self) -> bytes:
        """The names."""
        return self.names.tobytes()

    def part(self, indices: Tensor) -> "FolderImages":
        """Some of the images."""
        return replace(self, names=self.names[indices.numpy()])

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self.names[index])


def decode_image(content: bytes, decode_jpeg: _Decoder | None) -> Tensor | None:
    """The image as uint8 [h, w, 3]. What torchvision refuses, Pillow has a look at."""
    if decode_jpeg is not None and content.startswith(_JPEG) and _is_no_bomb(content):
        with suppress(RuntimeError):
            return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), _RGB).permute(1, 2, 0)
    array = with_image(content, lambda file: np.array(as_rgb(file)))
    return None if array is None else torch.from_numpy(array)


def _is_no_bomb(content: bytes) -> bool:
    """Whether Pillow, which torchvision's decoder does not ask, thinks that the image may be decoded."""
    return len(content) < _HARMLESS_BYTES or with_image(content, lambda image: image.size) is not None
