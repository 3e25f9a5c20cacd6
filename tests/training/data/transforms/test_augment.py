"""Augmentation: each flag does what it says, and a sample's look is a matter of seed, epoch and index alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.trainings import asked, load
from torch import Tensor
from torchvision.transforms import v2

from training.config.dataset_layout import Kind
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.dataset import MemoryImages
from training.data.loader import ImageSource
from training.data.transforms.augment import make_augmentation
from training.data.transforms.random_erasing import RandomErasing
from training.runtime.counter_rng import Purpose, derive_key

OPTIONS: list[dict[str, Any]] = [
    {},
    {"crop": "padded", "flip": "on"},
    {"auto_augment": "autoaugment"},
    {"random_erasing": 0.7},
    {"color_jitter": 0.4},
    {"crop": "resized", "flip": "on", "auto_augment": "randaugment", "random_erasing": 0.5},
]
NOTHING: dict[str, Any] = {"crop": "none", "flip": "off"}


@pytest.fixture(params=["idx_data", "cifar_data", "folder_data", "packed_data"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def name(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "auto"


def look(source: ImageSource, epoch: int | None, count: int = 8) -> Tensor:
    return source[BatchRequest(indices=tuple(range(count)), epoch=epoch)].images


# Workers are processes with a generator of their own, which policies ask.
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=name)
def test_what_a_rank_sees_does_not_depend_on_workers(path: Path, options: dict[str, Any]) -> None:
    source = load(path, val_split=0.0, **options).train
    order = torch.randperm(27, generator=torch.Generator().manual_seed(1)).tolist()
    requests = [BatchRequest(indices=tuple(order[start : start + 9]), epoch=1) for start in (0, 9, 18)]
    for batch, request, same in zip(asked(source, requests), requests, asked(source, requests, workers=2), strict=True):
        assert batch.indices.tolist() == list(request.indices)
        assert all(map(torch.equal, batch, same))


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_what_a_rank_sees_depends_on_seed_epoch_and_sample_alone(path: Path, options: dict[str, Any]) -> None:
    source, other = (load(path, val_split=0.0, **options, seed=seed).train for seed in (0, 1))
    seen = look(source, 3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    [first] = asked(source, [BatchRequest(indices=tuple(range(8)), epoch=3)])
    assert torch.equal(first.images, seen), "whatever torch's own generator is at"
    assert torch.equal(torch.get_rng_state(), before), "nor is it moved"
    shares = [BatchRequest(indices=share, epoch=3) for share in ((0,), (1, 2, 3, 4), (5, 6, 7))]
    for whole, parts in zip(first, zip(*asked(source, shares), strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts)), "however batches are shared"
    assert not torch.equal(seen, look(source, 4))
    assert not torch.equal(seen, look(other, 3))
    repeated = source[BatchRequest(indices=tuple(range(2 * len(source), 2 * len(source) + 8)), epoch=3)]
    assert torch.equal(first.indices, repeated.indices)
    assert torch.equal(first.labels, repeated.labels)
    assert not torch.equal(seen, repeated.images), "a repetition is augmented otherwise"
    plain = load(path, val_split=0.0, **NOTHING).train
    assert torch.equal(look(source, None), look(plain, None)), "an evaluation augments nothing"


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        ("idx_data", {"crop": "padded", "flip": "off"}),
        ("cifar_data", {"crop": "padded", "flip": "on"}),
        ("folder_data", {"crop": "resized", "flip": "on"}),
        ("packed_data", {"crop": "resized", "flip": "on"}),
    ],
)
def test_auto_is_what_suits_the_data(kind: str, usual: dict[str, Any], request: pytest.FixtureRequest) -> None:
    data: Path = request.getfixturevalue(kind)
    assert torch.equal(look(load(data).train, 1), look(load(data, **usual).train, 1))


def in_memory(images: Tensor, kind: Kind = "cifar10", **options: Any) -> Tensor:
    """What becomes of images in epoch 0."""
    config = TrainConfig(data="data", **NOTHING | options)
    augmentation = make_augmentation(config, kind, (0.5,) * images.shape[1])
    source = MemoryImages(images=images, labels=torch.zeros(len(images)), title="images", augmentation=augmentation)
    return source[BatchRequest(indices=tuple(range(len(images))), epoch=0)].images


def as_photo(index: int, image: Image.Image, size: int, **options: Any) -> Tensor:
    """What becomes of a photo with this index in epoch 0."""
    config = TrainConfig(data="data", **NOTHING | options)
    augmentation = make_augmentation(config, "image-folder", (0.5, 0.5, 0.5))
    cropped = augmentation.crop(0, index, (size, size)).of(torch.from_numpy(np.array(image)))
    return augmentation.batch(0, torch.tensor([index]), cropped[None])[0]


@pytest.mark.parametrize(("kind", "size", "most"), [("idx", 28, 1), ("cifar10", 32, 4), ("cifar100", 32, 4)])
def test_a_padded_crop_moves_images_in_memory_by_no_more_than_the_padding(kind: Kind, size: int, most: int) -> None:
    images = torch.zeros(1000, 3, size, size, dtype=torch.uint8)
    images[:, :, 14, 9] = 1
    seen = in_memory(images, kind, crop="padded").nonzero()
    assert len(seen) == 3000
    assert seen[:, 2].unique().tolist() == list(range(14 - most, 14 + most + 1))
    assert seen[:, 3].unique().tolist() == list(range(9 - most, 9 + most + 1))


def test_a_padded_crop_moves_an_image_of_a_file_by_no_more_than_an_eighth() -> None:
    photo = Image.new("RGB", (96, 64))
    photo.paste((255, 255, 255), (46, 30, 48, 32))  # one pixel of the 32 x 32 in the middle
    brightest = [int(as_photo(index, photo, 32, crop="padded")[0].argmax()) for index in range(100)]
    for places in zip(*(divmod(place, 32) for place in brightest), strict=True):
        assert sorted(set(places)) == list(range(11, 20))


def test_a_flip_mirrors_half_of_the_images() -> None:
    images = torch.zeros(400, 1, 8, 8, dtype=torch.uint8)
    images[..., 0] = 1
    photo = Image.fromarray(np.repeat(images[0, 0, :, :, None].numpy() * 255, 3, axis=2))
    photos = torch.stack([as_photo(index, photo, 8, flip="on") for index in range(400)])
    for seen in (in_memory(images, flip="on"), photos):
        mirrored = seen[:, 0, 0, 7] > 0
        assert 150 < int(mirrored.sum()) < 250
        assert torch.equal(seen[:, 0, 0, 0] > 0, ~mirrored)


def with_seed_of(index: int, transform: Callable[[Any], Any], image: Any) -> Any:
    torch.manual_seed(derive_key(0, Purpose.AUGMENTATION, 0, index))
    return transform(image)


def noise(count: int, channels: int = 3, size: int = 32) -> Tensor:
    shape = (count, channels, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# Flags, and what torchvision has for them, whatever the images were found on.
TRANSFORMS: list[tuple[dict[str, Any], Callable[[Any], Any]]] = [
    ({"auto_augment": "randaugment"}, v2.RandAugment()),
    ({"auto_augment": "trivialaugment"}, v2.TrivialAugmentWide()),
    (
        {"auto_augment": "trivialaugment", "auto_augment_interpolation": "bilinear"},
        v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR),
    ),
    ({"auto_augment": "randaugment", "randaugment_magnitude": 27}, v2.RandAugment(magnitude=27)),
    ({"color_jitter": 0.4}, v2.ColorJitter(0.4, 0.4, 0.4)),
    (
        {"color_jitter": 0.2, "auto_augment": "randaugment"},
        v2.Compose([v2.ColorJitter(0.2, 0.2, 0.2), v2.RandAugment()]),
    ),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("options", "transform"),
    [({"auto_augment": "autoaugment"}, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)), *TRANSFORMS],
    ids=lambda value: name(value) if isinstance(value, dict) else "",
)
def test_images_in_memory_become_what_torchvision_makes_of_them(
    options: dict[str, Any], transform: Callable[[Any], Any], channels: int
) -> None:
    images = noise(20, channels)
    expected = torch.stack([with_seed_of(index, transform, image) for index, image in enumerate(images)])
    assert torch.equal(in_memory(images, **options), expected)
    assert not torch.equal(images, expected)


@pytest.mark.parametrize(
    ("options", "transform"),
    [
        ({}, v2.Identity()),
        ({"auto_augment": "autoaugment"}, v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)),
        *TRANSFORMS,
    ],
    ids=lambda value: name(value) if isinstance(value, dict) else "",
)
def test_images_of_files_become_what_torchvision_makes_of_them(
    options: dict[str, Any], transform: Callable[[Any], Any]
) -> None:
    photo = Image.fromarray(noise(1)[0].permute(1, 2, 0).numpy())
    for index in range(20):
        expected = v2.functional.pil_to_tensor(with_seed_of(index, transform, photo))
        assert torch.equal(as_photo(index, photo, 32, **options), expected)


CROPPED = {"crop": "resized", "flip": "on"}


@pytest.mark.parametrize("policy", ["none", "randaugment"])
def test_crop_policy_and_erasing_come_in_this_order(policy: str) -> None:
    photo = Image.fromarray(noise(1, size=64)[0].permute(1, 2, 0).numpy())
    changes = [v2.ToPILImage(), v2.RandAugment(), v2.PILToTensor()] if policy == "randaugment" else []
    erasing = RandomErasing(seed=0, probability=1.0, color=(128,) * 3)
    for index in range(10):
        cropped = as_photo(index, photo, 32, **CROPPED)
        seen = as_photo(index, photo, 32, **CROPPED, auto_augment=policy, random_erasing=1.0)
        changed = with_seed_of(index, v2.Compose(changes), cropped) if changes else cropped
        assert torch.equal(seen, erasing.batch(0, torch.tensor([index]), changed[None])[0])
        assert not torch.equal(seen, changed)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_random_crop_of_images_in_memory_is_that_of_files_of_their_shape(channels: int) -> None:
    images = noise(20, channels)
    config = TrainConfig(data="data", **CROPPED)
    photos = make_augmentation(config, "image-folder", (0.5,) * 3)
    expected = [photos.crop(0, index, (32, 32)).of(image.permute(1, 2, 0)) for index, image in enumerate(images)]
    assert torch.equal(in_memory(images, **CROPPED), torch.stack(expected))
