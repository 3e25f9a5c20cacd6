"""Which parts of images are cropped and erased, and how they are scaled: as by torchvision, counted, on any device."""

from typing import get_args

import pytest
import torch
import torchvision
from torch import Tensor
from torchvision.transforms import v2

from training.config.train_config import Interpolation
from training.data.transforms.crop import RANDOM_NUMBERS, Crop, CropBox, random_box
from training.data.transforms.random_erasing import RandomErasing, fill_all, fill_each
from training.runtime.counter_rng import Purpose, derive_key, rand_float

# On CPUs without AVX, torchvision scales float32 and rounds.
PIXEL_TOLERANCE = 0 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 1


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
@pytest.mark.parametrize("shape", [(40, 50), (50, 40), (64, 64), (20, 100)])
def test_a_random_crop_of_an_image_is_a_box_scaled_as_torchvision_does_it(
    shape: tuple[int, int], interpolation: Interpolation
) -> None:
    mode = v2.InterpolationMode(interpolation)
    image = torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for index in range(20):
        box = random_box((rand_float(5, 32 * index + place) for place in range(RANDOM_NUMBERS)), *shape, (0.25, 1))
        planes = image.permute(2, 0, 1)
        expected = v2.functional.resized_crop(planes, *box, [32, 32], mode, antialias=True)

        def drawn(_height: int, _width: int, box: CropBox = box) -> CropBox:
            return box

        found = Crop(box=drawn, size=(32, 32), interpolation=interpolation).of(image)
        torch.testing.assert_close(found, expected, rtol=0, atol=PIXEL_TOLERANCE)


def boxes(count: int, height: int, width: int, area: tuple[float, float]) -> Tensor:
    key = derive_key(0, Purpose.AUGMENTATION, 0)
    numbers = ((rand_float(key, 32 * index + place) for place in range(RANDOM_NUMBERS)) for index in range(count))
    return torch.tensor([random_box(drawn, height, width, area) for drawn in numbers])


@pytest.mark.parametrize(("shape", "area"), [((300, 400), (0.08, 1)), ((100, 500), (0.25, 1)), ((7, 5), (0.25, 1))])
def test_random_crops_are_distributed_as_torchvisions(shape: tuple[int, int], area: tuple[float, float]) -> None:
    torch.manual_seed(0)
    image, count, ratio = torch.empty(3, *shape), 4000, [3 / 4, 4 / 3]
    theirs = torch.tensor(
        [torchvision.transforms.RandomResizedCrop.get_params(image, list(area), ratio) for _ in range(count)]
    )
    ours = boxes(count, *shape, area)
    assert bool((ours >= 0).all())
    assert bool((ours[:, :2] + ours[:, 2:] <= torch.tensor(shape)).all())
    for quantile in (0.1, 0.5, 0.9):
        found, wanted = (torch.quantile(each.float(), quantile, dim=0) for each in (ours, theirs))
        assert torch.allclose(found, wanted, atol=1, rtol=0.08), (found, wanted)


@pytest.mark.parametrize(("height", "width"), [(28, 20), (200, 300)])
def test_erased_rectangles_are_distributed_as_torchvisions(height: int, width: int) -> None:
    torch.manual_seed(0)
    image, count = torch.empty(3, height, width), 4000
    erase = torchvision.transforms.RandomErasing.get_params
    # Where it finds none that fits, it says the whole image.
    theirs = [erase(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(count)]
    wanted = torch.tensor([box for box in theirs if box[2] < height])
    ours = RandomErasing(seed=0, probability=1.0, color=(0,) * 3).boxes(0, torch.arange(count), height, width)
    assert bool((ours[:, 2] > 0).all())
    assert bool((ours >= 0).all())
    assert bool((ours[:, :2] + ours[:, 2:] <= torch.tensor([height, width])).all())
    for quantile in (0.1, 0.5, 0.9):
        found, expected = (torch.quantile(each.float(), quantile, dim=0) for each in (ours, wanted))
        assert torch.allclose(found, expected, atol=1, rtol=0.08), (found, expected)


def test_a_gpu_fills_the_rectangles_that_the_cpu_does() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (200, 3, 20, 30), dtype=torch.uint8)
    erasing = RandomErasing(seed=0, probability=0.6, color=(1, 2, 3))
    boxes, color = erasing.boxes(0, torch.arange(200), 20, 30), torch.tensor(erasing.color, dtype=torch.uint8)
    filled = fill_all(images, boxes, color)
    assert torch.equal(filled, fill_each(images, boxes, color))
    assert torch.equal(filled, erasing.batch(0, torch.arange(200), images))
    assert 80 < int((filled != images).any(3).any(2).any(1).sum()) < 160
