"""The first images of Fashion-MNIST, for benchmarks that need no more."""

import gzip
from pathlib import Path

_PIXELS = 28 * 28


def write_first(source: Path, target: Path, **counts: int) -> Path:
    """Write the first images of each part, such as `train=4000`, into a directory, and return it."""
    for part, count in counts.items():
        for kind, header, size in (("images-idx3", 16, _PIXELS), ("labels-idx1", 8, 1)):
            name = f"{part}-{kind}-ubyte.gz"
            raw = gzip.decompress((source / name).read_bytes())
            shortened = raw[:4] + count.to_bytes(4, "big") + raw[8 : header + count * size]
            (target / name).write_bytes(gzip.compress(shortened, 1))
    return target
