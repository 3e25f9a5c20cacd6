"""Computes the sizes of the training images, which grow with --initial-image-size. Pure; runs on every rank."""

from training.config.train_config import TrainConfig

# The number of parts of a training in which images have one size.
_PARTS = 5


def training_sizes(config: TrainConfig, size: int) -> list[int]:
    """Return the sides of the training images in the fifths of the epochs. In the last fifth, it is `size`.

    With --initial-image-size it grows, by multiples of 4 pixels: progressive resizing, as by Howard for DAWNBench
    (2018).
    """
    first = size if config.initial_image_size is None else config.initial_image_size
    growth = (size - first) / (_PARTS - 1)
    return [*(min(size, first + round(growth * part / 4) * 4) for part in range(_PARTS - 1)), size]


def size_in_epoch(config: TrainConfig, size: int, epoch: int) -> int:
    """Return the side of the training images in an epoch, counted from 0. In the last epoch it is `size`."""
    is_last = epoch >= config.epochs - 1
    return training_sizes(config, size)[_PARTS - 1 if is_last else epoch * _PARTS // config.epochs]
