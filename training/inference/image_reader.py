"""Reads image files as the evaluation of the model's training did. Runs wherever a model is used."""

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


class UnreadableError(Exception):
    """Why a file cannot be read as an image."""


class ImageReader:
    """Reads images for one model.

    Raises:
        UserError: the model takes neither gray nor color images.
    """

    def __init__(self, card: ModelCard) -> None:
        self._card, self._gray = card, card.image_shape[0] == 1
        if card.image_shape[0] not in {1, 3}:
            raise UserError(f"the model takes images of {card.image_shape[0]} channels: image files have 1 or 3")
        self._decode_jpeg = jpeg_decoder()

    def read(self, path: Path) -> Tensor:
        """The image (uint8 [*card.image_shape]).

        Raises:
            UnreadableError: the file cannot be read or decoded.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from error
        image = self._decode(content)
        if image is None:
            raise UnreadableError("it is no image, or damaged")
        channels, height, width = self._card.image_shape
        if self._card.crop_pct == 1 and image.shape == (height, width, channels):
            return image.permute(2, 0, 1)
        return center_crop(image, (height, width), self._card.crop_pct)

    def _decode(self, content: bytes) -> Tensor | None:
        """The image (uint8 [h, w, channels]); None if the content is no whole image."""
        if not self._gray:
            return decode_image(content, self._decode_jpeg)
        array = with_image(content, lambda file: np.array(as_rgb(file).convert("L")))
        return None if array is None else torch.from_numpy(array)[..., None]


def find_images(given: Sequence[Path]) -> Iterator[Path]:
    """The given files, and for each given directory the images in and below it, sorted by name.

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
