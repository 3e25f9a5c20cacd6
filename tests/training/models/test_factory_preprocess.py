"""What a model gets from the bytes of images."""

import pytest
import torch
from torchvision.transforms.v2 import functional

from training.models.factory import Preprocess

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.mark.parametrize(("channels", "inputs_channels"), [(1, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("size", [12, 20])
def test_bytes_of_both_memory_formats_become_the_same_floats(channels: int, inputs_channels: int, size: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (5, channels, 20, 20), dtype=torch.uint8)
    mean, std = MEAN[:channels], STD[:channels]
    preprocess = Preprocess(
        mean=torch.tensor(mean)[:, None, None],
        std=torch.tensor(std)[:, None, None],
        channels=inputs_channels,
        size=size,
    )
    expected = functional.normalize(images.float().div(255), mean, std)
    expected = functional.resize(expected, [size, size], antialias=True).expand(-1, inputs_channels, -1, -1)
    for layout in (torch.channels_last, torch.contiguous_format):
        inputs = preprocess(images.contiguous(memory_format=layout))
        # How kernels resize depends on the processor, and may depend on the memory format.
        tolerance = 0.0 if size == 20 else 1e-5
        torch.testing.assert_close(inputs, expected, rtol=0.0, atol=tolerance, msg=f"{layout} bytes")
        # torch takes images of one channel for contiguous in both formats, whatever their strides.
        assert inputs.stride()[1:] == (1, size * inputs_channels, inputs_channels)
