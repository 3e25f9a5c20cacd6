"""--initial-image-size: images grow from fifth to fifth of the epochs."""

from training.config.train_config import TrainConfig, size_in_epoch


def test_the_last_epoch_has_the_last_size() -> None:
    for epochs in range(1, 9):
        config = TrainConfig(data="x", model="resnet20", epochs=epochs, initial_image_size=128)
        found = [size_in_epoch(config, 224, epoch) for epoch in range(epochs)]
        assert found == sorted(found)
        assert found[-1] == 224
