"""Defines our own models for small images: a convolutional network and residual networks. Runs on every rank."""

from torch import Tensor, nn
from torch.nn import functional


def small_cnn(classes: int, channels: int, size: int) -> nn.Sequential:
    """Return a convolutional network without batch normalization, with 106,000 weights for 28 x 28 pixels.

    It has as many convolutions as are needed to reduce the image to 8 x 8 pixels. An image's result does not depend on
    the other images in the batch.
    """
    layers: list[nn.Module] = []
    width = 16
    while size > 8 or not layers:
        # Pool before the activation: the result is the same, with a quarter of the activations.
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels, size, width = width, size // 2, min(2 * width, 64)
    layers += [nn.Flatten(), nn.Linear(channels * size * size, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*layers)


class SmallResNet(nn.Module):
    """A residual network: a convolution, three stages of 16, 32 and 64 channels, mean pooling and a linear layer.

    He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016), section 4.2. With 20 layers it has
    270,000 weights.
    """

    def __init__(self, depth: int, classes: int, channels: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        blocks = [ResidualBlock(before, width) for before, width in zip([16, *widths], widths, strict=False)]
        self.features = nn.Sequential(*stem, *blocks)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map float [n, channels, h, w] to [n, classes]."""
        return self.fc(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them.

    If the shape changes, the shortcut has no weights (option A): it skips every other pixel and fills the new channels
    with zeros.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride, self.added = width // channels, width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, channels, h, w] to [n, width, h / stride, w / stride], rounded up."""
        values = functional.relu(self.bn1(self.conv1(images)))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return functional.relu(self.bn2(self.conv2(values)) + shortcut)
