"""JPEGs have the pixels that Pillow decodes, and a crop of a large one hardly differs when fewer pixels are decoded."""

import io
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.photos import HEIGHT, WIDTH, photo
from training.data.image_folder import as_rgb, decode_image
from training.data.transforms.crop import Crop, CropBox, center_box

WHOLE = Crop(box=lambda height, width: (0, 0, height, width), size=(HEIGHT, WIDTH))


def as_jpeg(mode: str, **options: int | bool) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo(0))).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def pixels(content: bytes) -> Tensor:
    """The image as Pillow decodes it, uint8 [h, w, 3]."""
    return torch.from_numpy(np.array(as_rgb(Image.open(io.BytesIO(content)))))


@pytest.mark.parametrize(
    "content",
    [
        as_jpeg("RGB"),
        as_jpeg("RGB", subsampling=0, progressive=True),
        as_jpeg("L"),
        as_jpeg("CMYK"),
        photo(1) + b"rest",
    ],
    ids=["usual", "progressive", "gray", "cmyk", "bytes after the end"],
)
def test_a_jpeg_has_the_pixels_that_pillow_decodes(content: bytes) -> None:
    image = decode_image(content, WHOLE)
    assert image is not None
    assert torch.equal(image, pixels(content).permute(2, 0, 1))


def test_a_jpeg_that_only_pillow_reads_is_read() -> None:
    content = as_jpeg("RGB", quality=60)
    damaged = content[:2000] + bytes(8) + content[2008:]
    image = decode_image(damaged, WHOLE)
    assert image is not None
    assert torch.equal(image, pixels(damaged).permute(2, 0, 1))


@pytest.mark.parametrize(("size", "decoded"), [(224, 375), (94, 375), (93, 188), (32, 94), (16, 47)])
def test_of_a_large_jpeg_only_the_pixels_are_decoded_that_the_crop_needs(size: int, decoded: int) -> None:
    heights = []

    def box(height: int, width: int) -> CropBox:
        heights.append(height)
        return center_box(height, width)

    crop = Crop(box=box, size=(size, size), may_be_reduced=True)
    image = decode_image(photo(2), crop)
    assert image is not None
    assert heights == [375, decoded]
    whole = crop.of(pixels(photo(2))).float()
    assert float((image.float() - whole).abs().mean()) < 4, "levels of 255"
    evaluated = decode_image(photo(2), replace(crop, may_be_reduced=False))
    assert evaluated is not None
    assert torch.equal(evaluated.float(), whole), "an evaluation decodes all pixels"


def test_no_crop_is_enlarged_from_a_reduced_image() -> None:
    crop = Crop(box=partial(center_box, crop_pct=0.2), size=(64, 64), may_be_reduced=True)
    assert crop.enough_of(375, 500) == (375, 500)
    assert crop.enough_of(3750, 5000) == (640, 854)
