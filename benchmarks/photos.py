"""JPEG files like photographs: 500 x 375 pixels, quality 92, about 100 KB each."""

import io
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

HEIGHT, WIDTH, QUALITY = 375, 500, 92
CLASSES = 10


def photo(seed: int) -> bytes:
    """Return a JPEG of noise whose amplitudes fall with the frequency as those of photographs do."""
    random = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(HEIGHT)[:, None] * HEIGHT, np.fft.rfftfreq(WIDTH) * WIDTH
    frequency = np.maximum(np.hypot(down, across), 1)
    waves = random.normal(size=(2, 3, *frequency.shape))
    noise = np.fft.irfft2((waves[0] + 1j * waves[1]) / frequency**1.3, s=(HEIGHT, WIDTH))
    noise *= np.array([55, 15, 15])[:, None, None] / noise.std(axis=(1, 2), keepdims=True)
    image = Image.fromarray(np.clip(128 + noise.transpose(1, 2, 0), 0, 255).astype(np.uint8), "YCbCr")
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def make_folder(root: Path, images: int, names: int = 4) -> None:
    """Make class directories with so many names of JPEGs, each different one under `names` of them."""
    with ProcessPoolExecutor() as pool:
        contents = list(pool.map(photo, range(images // names), chunksize=8))
    for number in range(CLASSES):
        (root / f"{number}").mkdir(parents=True)
    for number, content in enumerate(contents):
        first = root / f"{number % CLASSES}" / f"{number}-0.jpg"
        first.write_bytes(content)
        for name in range(1, names):
            first.with_name(f"{number}-{name}.jpg").hardlink_to(first)
