"""Gray images of any depth keep their gray levels, or are refused with the reason."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from hpc.base.errors import UserError
from training.data.image_folder import decode_image
from training.data.transforms.crop import Crop

SIDE = 48
WHOLE = Crop(box=lambda height, width: (0, 0, height, width), size=(SIDE, SIDE))
# Levels from 0 to 65535, all different.
RAMP = np.linspace(0, 65535, SIDE * SIDE).round().astype(np.uint16).reshape(SIDE, SIDE)


def tiff(values: np.ndarray, bits: int = 0, *, zero_is_white: bool = False, is_compressed: bool = False) -> bytes:
    """A TIFF file in the byte order of the values."""
    order = ">" if values.dtype.byteorder == ">" else "<"
    pixels = values.tobytes()
    if bits == 12:  # two values in three bytes
        pairs = values.reshape(-1, 2).astype(np.uint32)
        packed = pairs[:, 0] << 12 | pairs[:, 1]
        pixels = b"".join(int(value).to_bytes(3) for value in packed)
    pixels = zlib.compress(pixels) if is_compressed else pixels
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    short, long, entries = 3, 4, 10
    tags = [
        (256, short, values.shape[1]), (257, short, values.shape[0]), (258, short, bits or 8 * values.itemsize),
        (259, short, 8 if is_compressed else 1), (262, short, 0 if zero_is_white else 1),
        (273, long, 8 + 2 + entries * 12 + 4), (277, short, 1), (278, short, values.shape[0]), (279, long, len(pixels)),
        (339, short, kind),
    ]  # fmt: skip
    head = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(f"{order}IH", 8, entries)
    for tag, size, value in tags:
        head += struct.pack(f"{order}HHI", tag, size, 1)
        head += struct.pack(f"{order}I", value) if size == long else struct.pack(f"{order}HH", value, 0)
    return head + bytes(4) + pixels


def png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def decoded(content: bytes) -> Tensor:
    image = decode_image(content, WHOLE)
    assert image is not None
    return image


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(png(RAMP), id="png"),
        pytest.param(tiff(RAMP), id="tiff"),
        pytest.param(tiff(RAMP, is_compressed=True), id="tiff compressed"),
        pytest.param(tiff(~RAMP, zero_is_white=True), id="tiff with white 0"),
        pytest.param(tiff(RAMP >> 4, bits=12), id="tiff of 12 bits"),
        pytest.param(tiff(RAMP.astype("<i4")), id="tiff of integers"),
        pytest.param(tiff((RAMP >> 8).astype("<i4")), id="tiff of small integers"),
        pytest.param(tiff((RAMP / 65535).astype("<f4")), id="tiff of fractions"),
    ],
)
def test_a_gray_image_keeps_its_levels(content: bytes) -> None:
    image = decoded(content)
    assert np.abs(image[0].numpy().astype(int) - (RAMP >> 8)).max() <= 1
    assert all((image[channel] == image[0]).all() for channel in range(3))


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (tiff(RAMP.astype("<i4") * 30000), "0 to 1.96605e.09"),
        (tiff(RAMP.astype("<i4") - 5), "-5 to 65530"),
        (tiff(np.where(RAMP == 0, np.nan, 0.5).astype("<f4")), "nan to nan"),
    ],
)
def test_an_image_whose_white_is_unknown_is_refused_with_its_values(content: bytes, values: str) -> None:
    with pytest.raises(UserError, match=f"^its gray values are {values}, and white is unknown: save it with whole num"):
        decode_image(content, WHOLE)
