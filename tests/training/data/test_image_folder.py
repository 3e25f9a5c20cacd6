"""JPEGs have the pixels that Pillow decodes, and a crop of a large one hardly differs when fewer pixels are decoded."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from benchmarks.photos import HEIGHT, WIDTH, photo
from training.data.image_folder import as_rgb, decode_image
from training.data.transforms.crop import CenterCrop, Crop, CropBox, center_box

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


def with_extra_bytes(content: bytes) -> bytes:
    """A damaged JPEG, which simplejpeg refuses."""
    damaged = content[:2000] + bytes(500) + content[2500:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(damaged)
    return damaged


def with_odd_subsampling(content: bytes) -> bytes:
    """A JPEG with the subsampling 4:4:1, which simplejpeg does not know."""
    luma = content.index(b"\xff\xc0") + 11
    changed = content[:luma] + b"\x14" + content[luma + 1 :]
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(changed)
    return changed


@pytest.mark.parametrize("changed", [with_extra_bytes, with_odd_subsampling])
def test_a_jpeg_that_only_pillow_reads_is_read(changed: Callable[[bytes], bytes]) -> None:
    content = changed(photo(0))
    image = decode_image(content, WHOLE)
    assert image is not None
    assert torch.equal(image, pixels(content).permute(2, 0, 1)[:, :HEIGHT, :WIDTH])


def test_a_jpeg_that_may_be_lossless_is_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    content = photo(0)[:2] + b"\xff\xfe\x00\x04\xff\xc3" + photo(0)[2:]  # a comment with the marker of a lossless frame
    monkeypatch.delattr(simplejpeg, "decode_jpeg")
    image = decode_image(content, WHOLE)
    assert image is not None
    assert torch.equal(image, pixels(content).permute(2, 0, 1))


@pytest.mark.parametrize(("size", "decoded"), [(224, 375), (94, 375), (93, 188), (60, 141), (32, 94), (16, 47)])
def test_of_a_large_jpeg_only_the_pixels_are_decoded_that_the_crop_needs(
    size: int, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights, decode = [], simplejpeg.decode_jpeg

    def decoding(content: bytes, **options: int) -> np.ndarray:
        array: np.ndarray = decode(content, **options)
        heights.append(array.shape[0])
        return array

    monkeypatch.setattr(simplejpeg, "decode_jpeg", decoding)
    crop = Crop(box=center_box, size=(size, size))
    image = decode_image(photo(2), crop)
    assert image is not None
    assert heights == [decoded]
    whole = crop.of(pixels(photo(2))).float()
    assert float((image.float() - whole).abs().mean()) < 4, "levels of 255"
    heights.clear()
    decode_image(photo(2), CenterCrop(size=(size, size)))
    assert heights == [375], "an evaluation decodes all pixels"


def test_the_box_of_a_reduced_image_is_that_of_the_whole_image() -> None:
    boxes = []

    def box(height: int, width: int) -> CropBox:
        boxes.append((height, width))
        return height - 300, width - 300, 300, 300

    crop = Crop(box=box, size=(30, 30))
    image = decode_image(photo(3), crop)
    assert image is not None
    assert set(boxes) == {(HEIGHT, WIDTH)}
    reduced = torch.zeros(94, 125, 3, dtype=torch.uint8)
    reduced[19:] = 1
    assert bool((crop.of(reduced, (HEIGHT, WIDTH)) == 1).all()), "the lower 75 of 94 rows"
