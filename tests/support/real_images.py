"""Real images for tests: clothes from Debian's Fashion-MNIST or, without that package, scikit-learn's digits."""

import gzip

import numpy as np
import pytest

from training.config.dataset_layout import FASHION_MNIST_DIRECTORY, IDX_STEMS, find_idx, resolve_data

_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CLASSES = _CLOTHES if FASHION_MNIST_DIRECTORY.is_dir() else tuple("0123456789")
needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST_DIRECTORY.is_dir(), reason="needs Debian's package dataset-fashion-mnist"
)


def real_images(part: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images (uint8 [n, 28, 28]) and labels (uint8 [n]) of a part, `train` or `test`."""
    if FASHION_MNIST_DIRECTORY.is_dir():
        images, labels = (_read(f"{part}_{role}", header) for role, header in (("images", 16), ("labels", 8)))
        return images.reshape(-1, 28, 28)[:count], labels[:count]
    from training.data.in_memory import read_digits  # imports torch

    images, labels = (tensor.numpy() for tensor in read_digits(resolve_data("digits"), part))
    large = np.pad(images[:, 0].repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    # There are fewer digits, so they repeat.
    return np.resize(large, (count, 28, 28)), np.resize(labels, count).astype(np.uint8)


def _read(role: str, header: int) -> np.ndarray:
    path = find_idx(FASHION_MNIST_DIRECTORY, IDX_STEMS[role])
    assert path is not None
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8)[header:]
