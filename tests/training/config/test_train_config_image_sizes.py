"""--initial-image-size: images grow from fifth to fifth of the epochs."""

import pytest

from training.config.train_config import TrainConfig, size_in_epoch, training_sizes


@pytest.mark.parametrize(
    ("first", "last", "sizes"),
    [(128, 224, [128, 152, 176, 200, 224]), (21, 24, [21, 21, 21, 24, 24]), (None, 32, [32] * 5)],
)
def test_images_grow_from_fifth_to_fifth(first: int | None, last: int, sizes: list[int]) -> None:
    config = TrainConfig(data="x", model="resnet20", epochs=10, initial_image_size=first)
    assert training_sizes(config, last) == sizes
    assert [size_in_epoch(config, last, epoch) for epoch in range(10)] == [size for size in sizes for _ in range(2)]


def test_the_last_epoch_has_the_last_size() -> None:
    for epochs in range(1, 9):
        config = TrainConfig(data="x", model="resnet20", epochs=epochs, initial_image_size=128)
        found = [size_in_epoch(config, 224, epoch) for epoch in range(epochs)]
        assert found == sorted(found)
        assert found[-1] == 224
