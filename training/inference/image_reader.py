"""Image files as a trained model wants them: what its evaluation did with the images of its data set.

Runs wherever a model is used.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpc.core.errors import UserError
from training.config.dataset_layout import is_image
from training.data.image_folder import as_rgb, decode_image, jpeg_decoder, with_image
from training.data.transforms.crop import center_crop
from training.inference.model_card import ModelCard

_KINDS = {1: "gray", 3: "color"}


class UnreadableError(Exception):
    """A file is no image; says why."""


class ImageReader:
    """Reads images for one model.

    Raises:
        UserError: the model takes images that no file holds.
    """

    def __init__(self, card: ModelCard) -> None:
        self._card, self._gray = card, card.pixels[0] == 1
        if card.pixels[0] not in _KINDS:
            raise UserError(f"the model takes images of {card.pixels[0]} channels, which no image file has")
        self._decode_jpeg = jpeg_decoder()

    def read(self, path: Path) -> Tensor:
        """The image (uint8 [channels, height, width] as in `Card.pixels`).

        Raises:
            UnreadableError: there is no whole image in the file.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from error
        image = self._decode(content)
        if image is None:
            raise UnreadableError("it holds no whole image")
        return self._look(image)

    def _decode(self, content: bytes) -> Tensor | None:
        """Uint8 [h, w, channels]."""
        if not self._gray:
            return decode_image(content, self._decode_jpeg)
        array = with_image(content, lambda file: np.array(as_rgb(file).convert("L")))
        return None if array is None else torch.from_numpy(array)[..., None]

    def _look(self, image: Tensor) -> Tensor:
        channels, height, width = self._card.pixels
        if self._card.crop_pct == 1 and image.shape == (height, width, channels):
            return image.permute(2, 0, 1)
        return center_crop(image, (height, width), self._card.crop_pct)


def find_images(given: Sequence[Path]) -> Iterator[Path]:
    """The files that are given, and those that are images in the directories that are, in the order of their names.

    Raises:
        UserError: a directory has none.
    """
    for path in given:
        if not path.is_dir():
            yield path
            continue
        names = sorted(
            os.path.join(directory, name)  # noqa: PTH118  # of a million
            for directory, _, files in os.walk(path)
            for name in files
            if is_image(name)
        )
        if not names:
            raise UserError(f"there are no images in {path}: give files, or a directory with some")
        yield from map(Path, names)
