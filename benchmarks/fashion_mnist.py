"""Fashion-MNIST in the forms that benchmarks need: unpacked, or its first images alone."""

import gzip
from pathlib import Path

from training.config.dataset_layout import FASHION_MNIST_DIRECTORY

_PIXELS = 28 * 28


def unpack(target: Path) -> Path:
    """Write the files of Debian's package uncompressed into a new directory, and return it."""
    target.mkdir()
    for source in FASHION_MNIST_DIRECTORY.glob("*.gz"):
        (target / source.stem).write_bytes(gzip.decompress(source.read_bytes()))
    return target


def write_first(source: Path, target: Path, **counts: int) -> Path:
    """Write the first images of each part, such as `train=4000`, into a directory, and return it."""
    for part, count in counts.items():
        for kind, header, size in (("images-idx3", 16, _PIXELS), ("labels-idx1", 8, 1)):
            name = f"{part}-{kind}-ubyte.gz"
            raw = gzip.decompress((source / name).read_bytes())
            shortened = raw[:4] + count.to_bytes(4, "big") + raw[8 : header + count * size]
            (target / name).write_bytes(gzip.compress(shortened, 1))
    return target
